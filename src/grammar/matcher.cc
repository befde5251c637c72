#include "grammar/matcher.h"

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace calla {
namespace {

uint64_t mix(uint64_t hash, uint64_t value) {
  hash = (hash ^ value) * 0x9e3779b97f4a7c15u;
  return hash ^ (hash >> 29);
}

constexpr size_t kVisitedSlots = 16384;  // a power of two, above twice the positions of one state

}  // namespace

Matcher::Matcher(std::shared_ptr<const Grammar> grammar)
    : grammar_(std::move(grammar)), visited_table_(kVisitedSlots), visited_epoch_(kVisitedSlots, 0) {
  clear();
  check(start_ != kDead, "a grammar was run that generates nothing");
}

void Matcher::clear() {
  states_.clear();
  frames_.clear();
  frame_index_.clear();
  state_index_.clear();
  total_positions_ = 0;
  states_.emplace_back();  // kDead
  states_[kDead].transitions = std::make_unique<Transitions>();
  states_[kDead].transitions->fill(kDead);
  frames_.emplace_back();  // kEmptyStack
  ++epoch_;
  visited_count_ = 0;
  reach(grammar_->start(), kEmptyStack);
  start_ = intern();
}

Matcher::StateId Matcher::trim(StateId state, bool force) {
  work_ = 0;
  if (!force && states_.size() <= kKeptStates && total_positions_ <= kMaxTotalPositions / 4) return state;
  if (state == start_ || state == kDead) {
    const bool was_dead = state == kDead;
    ++generation_;
    clear();
    return was_dead ? kDead : start_;
  }
  // Copy the state's stacks out, start afresh, and push them again, parents first.
  std::vector<Position> positions = states_[state].positions;
  const bool accepting = states_[state].accepting;
  const std::vector<Frame> old_frames = std::move(frames_);
  ++generation_;
  clear();
  std::unordered_map<StackId, StackId> renumbered{{kEmptyStack, kEmptyStack}};
  std::vector<StackId> chain;
  for (Position& position : positions) {
    chain.clear();
    StackId stack = position.stack;
    while (!renumbered.contains(stack)) {
      chain.push_back(stack);
      stack = old_frames[stack].parent;
    }
    StackId fresh = renumbered[stack];
    while (!chain.empty()) {
      const Frame& frame = old_frames[chain.back()];
      fresh = push(fresh, frame.edge, frame.count);
      renumbered[chain.back()] = fresh;
      chain.pop_back();
    }
    position.stack = fresh;
  }
  gathered_ = std::move(positions);
  gathered_accepting_ = accepting;
  return intern();
}

Matcher::StackId Matcher::push(StackId parent, Grammar::EdgeId edge, uint32_t count) {
  const uint64_t hash = mix(mix(mix(0, parent), edge), count);
  std::vector<StackId>& bucket = frame_index_[hash];
  for (StackId id : bucket)
    if (frames_[id].parent == parent && frames_[id].edge == edge && frames_[id].count == count) return id;
  const auto id = static_cast<StackId>(frames_.size());
  frames_.push_back({.parent = parent, .edge = edge, .count = count, .depth = frames_[parent].depth + 1});
  bucket.push_back(id);
  return id;
}

void Matcher::visit(Position position) {
  const uint32_t height = grammar_->node(position.node).height;
  if (height == Grammar::kNone || frames_[position.stack].depth + height > Grammar::kMaxDepth) return;
  // A state with very many positions loses some: narrower than the grammar, but sound as long as one is left.
  if (visited_count_ >= kMaxPositions && (!gathered_.empty() || visited_count_ >= kVisitedSlots / 2)) {
    has_dropped_ = true;
    return;
  }
  size_t slot = mix(mix(1, position.node), position.stack) & (kVisitedSlots - 1);
  while (visited_epoch_[slot] == epoch_) {
    if (visited_table_[slot] == position) return;
    slot = (slot + 1) & (kVisitedSlots - 1);
  }
  visited_epoch_[slot] = epoch_;
  visited_table_[slot] = position;
  ++visited_count_;
  ++work_;
  pending_.push_back(position);
}

void Matcher::reach(NodeId node, StackId stack) {
  visit({node, stack});
  while (!pending_.empty()) {
    const Position at = pending_.back();
    pending_.pop_back();
    const Grammar::Node& place = grammar_->node(at.node);
    if (place.accepting) {
      if (at.stack == kEmptyStack) {
        gathered_accepting_ = true;
      } else {
        const Frame frame = frames_[at.stack];
        const Grammar::Edge& edge = grammar_->edge(frame.edge);
        const bool unbounded = edge.max == Grammar::kUnbounded;
        // Past the minimum an unbounded count no longer matters, so that the number of states stays finite.
        const uint32_t count = unbounded ? std::min(frame.count + 1, edge.min) : frame.count + 1;
        if (count >= edge.min) visit({edge.target, frame.parent});
        if (unbounded || count < edge.max) visit({edge.body, push(frame.parent, frame.edge, count)});
      }
    }
    bool takes_input = false;
    for (Grammar::EdgeId e = place.first_edge; e != Grammar::kNone; e = grammar_->edge(e).next) {
      const Grammar::Edge& edge = grammar_->edge(e);
      switch (edge.kind) {
        case Grammar::EdgeKind::kBytes:
        case Grammar::EdgeKind::kToken:
          takes_input = true;
          break;
        case Grammar::EdgeKind::kEpsilon:
          visit({edge.target, at.stack});
          break;
        case Grammar::EdgeKind::kRepeat: {
          if (edge.min == 0) visit({edge.target, at.stack});
          if (edge.max == 0) break;
          const Grammar::Node& after = grammar_->node(edge.target);
          const bool is_last_call =
              edge.min == 1 && edge.max == 1 && after.accepting && after.first_edge == Grammar::kNone;
          // Both the rounds and what follows must fit under the depth limit before the frame is pushed.
          if (!is_last_call &&
              (after.height == Grammar::kNone || frames_[at.stack].depth + after.height > Grammar::kMaxDepth))
            break;
          visit({edge.body, is_last_call ? at.stack : push(at.stack, e, 0)});
          break;
        }
      }
    }
    if (takes_input) gathered_.push_back(at);
  }
}

Matcher::StateId Matcher::intern() {
  std::sort(gathered_.begin(), gathered_.end());
  gathered_.erase(std::unique(gathered_.begin(), gathered_.end()), gathered_.end());
  const bool accepting = std::exchange(gathered_accepting_, false);
  std::vector<Position> positions = std::exchange(gathered_, {});
  if (positions.empty() && !accepting) return kDead;
  uint64_t hash = accepting ? 1 : 0;
  for (const Position& p : positions) hash = mix(mix(hash, p.node), p.stack);
  std::vector<StateId>& bucket = state_index_[hash];
  for (StateId id : bucket)
    if (states_[id].accepting == accepting && states_[id].positions == positions) return id;
  if (states_.size() >= kMaxStates || total_positions_ + positions.size() > kMaxTotalPositions) return kUnknown;
  total_positions_ += positions.size();
  const auto id = static_cast<StateId>(states_.size());
  std::optional<Text> text = text_of(positions);
  states_.push_back({.positions = std::move(positions), .accepting = accepting, .text = text, .transitions = nullptr});
  bucket.push_back(id);
  return id;
}

Matcher::StateId Matcher::compute_step(StateId state, uint8_t byte) {
  if (!has_room()) return kDead;  // not remembered, since trim() makes room again
  ++epoch_;
  visited_count_ = 0;
  for (const Position& at : states_[state].positions)
    for (Grammar::EdgeId e = grammar_->node(at.node).first_edge; e != Grammar::kNone; e = grammar_->edge(e).next) {
      const Grammar::Edge& edge = grammar_->edge(e);
      if (edge.kind == Grammar::EdgeKind::kBytes && edge.low <= byte && byte <= edge.high) reach(edge.target, at.stack);
    }
  const StateId next = intern();
  if (next == kUnknown) return kDead;
  std::unique_ptr<Transitions>& table = states_[state].transitions;
  if (table == nullptr) {
    table = std::make_unique<Transitions>();
    table->fill(kUnknown);
  }
  (*table)[byte] = next;
  return next;
}

Matcher::StateId Matcher::step(StateId state, std::string_view bytes) {
  for (const char c : bytes) {
    if (state == kDead) break;
    state = step(state, static_cast<uint8_t>(c));
  }
  return state;
}

Matcher::StateId Matcher::step_token(StateId state, TokenId token) {
  if (!has_room()) return kDead;
  ++epoch_;
  visited_count_ = 0;
  for (const Position& at : states_[state].positions)
    for (Grammar::EdgeId e = grammar_->node(at.node).first_edge; e != Grammar::kNone; e = grammar_->edge(e).next) {
      const Grammar::Edge& edge = grammar_->edge(e);
      if (edge.kind == Grammar::EdgeKind::kToken && edge.token == token) reach(edge.target, at.stack);
    }
  const StateId next = intern();
  return next == kUnknown ? kDead : next;
}

void Matcher::append_tokens(StateId state, std::vector<TokenId>& tokens) const {
  if (!grammar_->has_token_edges()) return;
  for (const Position& at : states_[state].positions)
    for (Grammar::EdgeId e = grammar_->node(at.node).first_edge; e != Grammar::kNone; e = grammar_->edge(e).next)
      if (grammar_->edge(e).kind == Grammar::EdgeKind::kToken) tokens.push_back(grammar_->edge(e).token);
}

bool Matcher::takes_only_quote(NodeId node) const {
  for (Grammar::EdgeId e = grammar_->node(node).first_edge; e != Grammar::kNone; e = grammar_->edge(e).next) {
    const Grammar::Edge& edge = grammar_->edge(e);
    if (edge.kind == Grammar::EdgeKind::kBytes && (edge.low != '"' || edge.high != '"')) return false;
  }
  return true;
}

std::optional<Matcher::Text> Matcher::text_of(const std::vector<Position>& positions) const {
  std::optional<Text> best;
  bool others = false;  // positions that may take plain text in their own way
  for (const Position& at : positions) {
    const Grammar::TextKind kind = grammar_->node(at.node).text;
    uint32_t room = Grammar::kUnbounded;
    if (kind == Grammar::TextKind::kNone) {
      others = others || !takes_only_quote(at.node);
      continue;
    }
    if (kind == Grammar::TextKind::kJsonString) {
      const Frame& frame = frames_[at.stack];
      const Grammar::Edge& edge = grammar_->edge(frame.edge);
      if (edge.max != Grammar::kUnbounded) room = edge.max - frame.count;
    }
    if (best && best->kind != kind) return std::nullopt;
    if (!best || room > best->room) best = Text{kind, room};
  }
  if (best && best->room != Grammar::kUnbounded && others) return std::nullopt;
  return best;
}

}  // namespace calla
