#include "findings.h"

#include <dlfcn.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <initializer_list>
#include <memory>
#include <stdexcept>
#include <utility>

namespace softmetal {
namespace {

struct State {
  std::mutex mutex;
  Options options;
  std::vector<Finding> findings;
  std::set<std::string> reported;
  std::map<Failure, int> injections;
  bool lost = false;
  uint64_t seeds = 0;
  std::atomic<uint64_t> version{0};
};

uint64_t mix(uint64_t x) {
  x += 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

void choose_seed(Options& o) {
  if (o.seed == 0) o.seed = mix(static_cast<uint64_t>(std::chrono::system_clock::now().time_since_epoch().count())) | 1;
}

// A variable that means nothing would make a test pass that tests nothing.
[[noreturn]] void refuse(const char* name, const std::string& value, const char* expected) {
  throw std::invalid_argument(std::string("softmetal: ") + name + "='" + value + "': expected " + expected);
}

bool flag(const char* name, bool otherwise) {
  const char* value = std::getenv(name);
  if (value == nullptr) return otherwise;
  const std::string text = value;
  if (text != "0" && text != "1") refuse(name, text, "0 or 1");
  return text == "1";
}

uint64_t number(const char* name, uint64_t otherwise, uint64_t most) {
  const char* value = std::getenv(name);
  if (value == nullptr) return otherwise;
  char* end = nullptr;
  errno = 0;
  const uint64_t parsed = std::strtoull(value, &end, 0);
  if (end == value || *end != '\0' || errno != 0 || parsed > most || *value == '-')
    refuse(name, value, ("a number up to " + std::to_string(most)).c_str());
  return parsed;
}

// The value of a variable among named ones.
template <class T>
T choice(const char* name, T otherwise, std::initializer_list<std::pair<const char*, T>> known) {
  const char* value = std::getenv(name);
  if (value == nullptr) return otherwise;
  std::string names;
  for (const auto& [text, meaning] : known) {
    if (std::string(value) == text) return meaning;
    names += (names.empty() ? "" : ", ") + std::string(text);
  }
  refuse(name, value, names.c_str());
}

Options initial_options() {
  constexpr uint64_t kMostThreads = 256;
  const char* device = std::getenv("SOFTMETAL_DEVICE");
  Options o = device ? device_preset(device) : Options{};
  o.check = flag("SOFTMETAL_CHECK", o.check);
  o.count = flag("SOFTMETAL_COUNT", o.count);
  o.shuffle = flag("SOFTMETAL_SHUFFLE", o.shuffle);
  o.strict_bindings = flag("SOFTMETAL_STRICT_BINDINGS", o.strict_bindings);
  o.seed = number("SOFTMETAL_SEED", o.seed, UINT64_MAX);
  o.threads = static_cast<int>(number("SOFTMETAL_THREADS", static_cast<uint64_t>(o.threads), kMostThreads));
  o.tensor_layout =
      choice("SOFTMETAL_LAYOUT", o.tensor_layout, {{"m5", TensorLayout::kM5}, {"shuffled", TensorLayout::kShuffled}});
  o.tensor_fault = choice("SOFTMETAL_TENSOR_FAULT", o.tensor_fault,
                          {{"none", TensorFault::kNone},
                           {"element", TensorFault::kOneElement},
                           {"tail", TensorFault::kDroppedTail},
                           {"sums", TensorFault::kShortSums}});
  choose_seed(o);
  return o;
}

State& state() {
  static State& s = *[] {
    auto* made = new State;  // lives as long as the process: devices may outlive static destructors
    made->options = initial_options();
    return made;
  }();
  return s;
}

}  // namespace

Options device_preset(const std::string& chip) {
  struct Chip {
    const char* key;
    const char* name;
    const char* architecture;
    int family;  // newest Apple family
    bool metal4;
    uint64_t memory_gib;
  };
  static constexpr Chip kChips[] = {
      {"m1", "Apple M1", "applegpu_g13g", 1007, false, 16},
      {"m2max", "Apple M2 Max", "applegpu_g14s", 1008, false, 64},
      {"m3max", "Apple M3 Max", "applegpu_g15s", 1009, true, 64},
      {"m4max", "Apple M4 Max", "applegpu_g16s", 1009, true, 128},
      {"m5", "Apple M5", "applegpu_g17g", 1010, true, 32},
      {"m5max", "Apple M5 Max", "applegpu_g17s", 1010, true, 128},
  };
  for (const Chip& c : kChips) {
    if (chip != c.key) continue;
    Options o;
    o.device_name = c.name;
    o.architecture = c.architecture;
    o.families = {3003, 5001};
    for (int family = 1001; family <= c.family; ++family) o.families.push_back(family);
    if (c.metal4) o.families.push_back(5002);
    o.recommended_working_set = (c.memory_gib << 30) / 4 * 3;
    o.max_buffer_length = static_cast<size_t>((c.memory_gib << 30) / 2);
    choose_seed(o);
    return o;
  }
  throw std::invalid_argument("softmetal: no chip named \"" + chip + "\"; known: m1, m2max, m3max, m4max, m5, m5max");
}

Options options() {
  std::lock_guard lock(state().mutex);
  return state().options;
}

void set_options(const Options& options) {
  std::lock_guard lock(state().mutex);
  state().options = options;
  choose_seed(state().options);
  state().lost = false;
  state().seeds = 0;
  ++state().version;
}

uint64_t options_version() { return state().version.load(std::memory_order_relaxed); }

uint64_t next_seed() {
  std::lock_guard lock(state().mutex);
  return mix(state().options.seed + ++state().seeds);
}

const char* fault_name(Fault fault) {
  switch (fault) {
    case Fault::kOutOfBounds:
      return "out of bounds";
    case Fault::kReadOnlyWrite:
      return "write to read-only memory";
    case Fault::kUninitialised:
      return "uninitialised read";
    case Fault::kRace:
      return "race";
    case Fault::kMissingBarrier:
      return "missing barrier between dispatches";
    case Fault::kMissingFence:
      return "missing fence between encoders";
    case Fault::kDivergence:
      return "divergence";
    case Fault::kMissingLane:
      return "missing lane";
    case Fault::kMisaligned:
      return "misaligned access";
    case Fault::kUndefined:
      return "undefined behaviour";
    case Fault::kBadCall:
      return "bad call";
    case Fault::kHostRace:
      return "freed while in use";
    case Fault::kEndless:
      return "endless kernel";
  }
  return "?";
}

std::string describe(const Finding& f) {
  std::string text = std::string(fault_name(f.fault)) + ": ";
  if (!f.kernel.empty()) {
    text += "kernel " + f.kernel;
    if (!f.lanes.empty())
      text += ", threadgroup (" + std::to_string(f.threadgroup.x) + ", " + std::to_string(f.threadgroup.y) + ", " +
              std::to_string(f.threadgroup.z) + "), thread " + f.lanes;
    if (!f.place.empty()) text += ", " + f.place;
    text += ": ";
  }
  return text + f.message;
}

bool report_finding(Finding finding) {
  State& s = state();
  std::lock_guard lock(s.mutex);
  const std::string where = finding.place.empty() ? finding.message : finding.place;
  const std::string key = std::to_string(static_cast<int>(finding.fault)) + "|" + finding.kernel + "|" + where;
  if (!s.reported.insert(key).second) return false;
  std::fprintf(stderr, "softmetal: %s [seed %llu]\n", describe(finding).c_str(),
               static_cast<unsigned long long>(s.options.seed));
  s.findings.push_back(std::move(finding));
  return true;
}

std::vector<Finding> take_findings() {
  State& s = state();
  std::lock_guard lock(s.mutex);
  s.reported.clear();
  return std::exchange(s.findings, {});
}

std::string last_finding() {
  std::lock_guard lock(state().mutex);
  return state().findings.empty() ? "a fault reported before" : describe(state().findings.back());
}

void inject(Failure failure, int skip) {
  std::lock_guard lock(state().mutex);
  state().injections[failure] = skip;
}

bool injected(Failure failure) {
  State& s = state();
  std::lock_guard lock(s.mutex);
  const auto it = s.injections.find(failure);
  if (it == s.injections.end() || it->second-- > 0) return false;
  s.injections.erase(it);
  return true;
}

bool device_is_lost() {
  std::lock_guard lock(state().mutex);
  return state().lost;
}

void lose_device() {
  std::lock_guard lock(state().mutex);
  state().lost = true;
}

std::string place_of(const std::source_location& at) {
  return std::string(at.file_name()) + ":" + std::to_string(at.line());
}

std::string place_of(const void* pc) {
  static std::mutex mutex;
  static auto& cache = *new std::map<const void*, std::string>;
  std::lock_guard lock(mutex);
  if (const auto it = cache.find(pc); it != cache.end()) return it->second;
  Dl_info info{};
  std::string place = "(unknown code)";
  if (dladdr(pc, &info) && info.dli_fname) {
    const auto offset = static_cast<const char*>(pc) - static_cast<const char*>(info.dli_fbase);
    char command[1024];
    // -1: the call before the return address. -i lists the inlined chain; the first place in kernel source counts.
    std::snprintf(command, sizeof command, "addr2line -i -e '%s' 0x%tx 2>/dev/null", info.dli_fname, offset - 1);
    place = std::string(info.dli_fname) + "+" + std::to_string(offset);
    const std::unique_ptr<FILE, int (*)(FILE*)> pipe(popen(command, "r"), &pclose);
    std::string first;
    char line[1024];
    while (pipe && std::fgets(line, sizeof line, pipe.get())) {
      std::string text(line);
      while (!text.empty() && (text.back() == '\n' || text.back() == '\r')) text.pop_back();
      if (const size_t note = text.find(" (discriminator"); note != std::string::npos) text.resize(note);
      if (text.starts_with("??")) continue;
      if (first.empty()) first = text;
      if (text.find("/msl/softmetal/") == std::string::npos) {  // not inside the shim
        first = text;
        break;
      }
    }
    if (!first.empty()) place = first;
  }
  return cache[pc] = place;
}

}  // namespace softmetal
