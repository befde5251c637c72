#include "hazards.h"

#include <algorithm>

#include "findings.h"

namespace softmetal {
namespace {

// The first conflict of two sets: memory id and byte.
std::optional<std::pair<uint64_t, size_t>> conflict(const AccessSet& a, const AccessSet& b) {
  const bool a_is_smaller = a.size() < b.size();
  const AccessSet& few = a_is_smaller ? a : b;
  const AccessSet& many = a_is_smaller ? b : a;
  for (const auto& [key, set] : few) {
    const auto other = many.find(key);
    if (other == many.end()) continue;
    if (const int byte = set->conflict(*other->second); byte >= 0)
      return std::pair{key.first, key.second * kShadowPage + static_cast<size_t>(byte)};
  }
  return std::nullopt;
}

std::string name_of(const Memory& memory) {
  return memory.label.empty() ? "a buffer of " + std::to_string(memory.bytes()) + " bytes"
                              : "buffer \"" + memory.label + "\"";
}

}  // namespace

void HazardTracker::begin_encoder(const EncoderRecord& encoder, uint64_t id, uint64_t command_buffer,
                                  const std::vector<uint64_t>& ordered_before) {
  std::lock_guard guard(mutex_);
  record_ = &encoder;
  phase_.clear();
  current_ = std::make_unique<Encoder>();
  current_->id = id;
  current_->command_buffer = command_buffer;
  current_->label = encoder.label.empty() ? "encoder " + std::to_string(id) : "encoder \"" + encoder.label + "\"";
  std::set<uint64_t>& before = current_->before;
  before.insert(ordered_before.begin(), ordered_before.end());
  for (const auto& fence : encoder.waits) {
    std::lock_guard lock(fence->mutex);
    before.insert(fence->encoders.begin(), fence->encoders.end());
  }
  // What came before those is before this one as well.
  const std::set<uint64_t>& ended = ended_at_commit_[command_buffer];
  for (auto it = past_.rbegin(); it != past_.rend(); ++it) {
    const Encoder& e = **it;
    if (ended.contains(e.command_buffer)) before.insert(e.id);
    if (before.contains(e.id)) before.insert(e.before.begin(), e.before.end());
  }
}

std::string HazardTracker::add(const std::string& name, AccessSet set,
                               const std::map<uint64_t, const Memory*>& memories) {
  std::lock_guard guard(mutex_);
  std::string error;
  const auto report = [&](Fault fault, const std::pair<uint64_t, size_t>& where, const std::string& other,
                          const std::string& advice) {
    const std::string message = "touches byte " + std::to_string(where.second) + " of " +
                                name_of(*memories.at(where.first)) + ", as does " + other + ", one of them writing; " +
                                advice;
    report_finding({fault, name, {}, "", "", message});
    if (error.empty()) error = std::string(fault_name(fault)) + ": " + name + " " + message;
  };
  if (record_->concurrent)
    for (const Access& earlier : phase_)
      if (const auto where = conflict(earlier.set, set))
        report(Fault::kMissingBarrier, *where, earlier.name + " of the same encoder",
               "a memoryBarrier must separate them");

  AccessSet untracked;
  for (const auto& [key, pages] : set) {
    const Memory& memory = *memories.at(key.first);
    if (memory.untracked && !memory.device_only) untracked[key] = std::make_unique<PageSet>(*pages);
  }
  for (const auto& earlier : past_)
    if (!current_->before.contains(earlier->id))
      if (const auto where = conflict(earlier->set, untracked))
        report(Fault::kMissingFence, *where, "an earlier " + earlier->label,
               "the buffer is untracked, so a fence or event must order the encoders");
  for (auto& [key, pages] : untracked) {
    auto& mine = current_->set[key];
    if (mine) {
      mine->add(*pages);
    } else {
      mine = std::move(pages);
    }
  }
  if (record_->concurrent) phase_.push_back({name, std::move(set)});
  return error;
}

void HazardTracker::barrier(const Barrier& barrier) {
  if (barrier.resources.empty()) {
    phase_.clear();
    return;
  }
  for (const auto& memory : barrier.resources)
    for (Access& access : phase_)
      std::erase_if(access.set, [&](const auto& entry) { return entry.first.first == memory->id; });
}

void HazardTracker::end_encoder() {
  std::lock_guard guard(mutex_);
  for (const auto& fence : record_->updates) {
    std::lock_guard lock(fence->mutex);
    fence->encoders.assign(current_->before.begin(), current_->before.end());
    fence->encoders.push_back(current_->id);
  }
  phase_.clear();
  record_ = nullptr;
  past_.push_back(std::move(current_));
}

void HazardTracker::command_buffer_committed(uint64_t command_buffer) {
  std::lock_guard guard(mutex_);
  ended_at_commit_[command_buffer] = ended_command_buffers_;
}

void HazardTracker::command_buffer_ended(uint64_t command_buffer) {
  std::lock_guard guard(mutex_);
  ended_at_commit_.erase(command_buffer);
  ended_command_buffers_.insert(command_buffer);
  // An encoder matters as long as a committed command buffer does not know that it has ended.
  const auto known_by_all = [this](uint64_t ended) {
    return ended_command_buffers_.contains(ended) &&
           std::all_of(ended_at_commit_.begin(), ended_at_commit_.end(),
                       [&](const auto& c) { return c.second.contains(ended); });
  };
  std::erase_if(past_, [&](const auto& e) { return known_by_all(e->command_buffer); });
  std::erase_if(ended_command_buffers_, [&](uint64_t ended) {
    return known_by_all(ended) &&
           std::none_of(past_.begin(), past_.end(), [&](const auto& e) { return e->command_buffer == ended; });
  });
}

}  // namespace softmetal
