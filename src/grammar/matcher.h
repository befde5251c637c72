#pragma once
// Matcher: runs a Grammar over bytes. The grammar is nondeterministic and has a stack, so a state is a set of
// positions (node, stack); states are numbered as they are met and their transitions remembered, which makes
// a step one table look-up nearly always. Memory is bounded: old states are forgotten between steps, and
// within one step at most kMaxStates are made.
//
// Every position kept can be completed within Grammar::kMaxDepth (see Node::height), so there are no dead
// ends.
#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "grammar/grammar.h"

namespace calla {

class Matcher {
 public:
  using StateId = uint32_t;
  static constexpr StateId kDead = 0;  // nothing matches from here
  static constexpr size_t kMaxStates = 8192;

  explicit Matcher(std::shared_ptr<const Grammar> grammar);

  StateId start() const { return start_; }

  // The state after `byte`, or kDead.
  StateId step(StateId state, uint8_t byte) {
    const Transitions* table = states_[state].transitions.get();
    if (table != nullptr && (*table)[byte] != kUnknown) return (*table)[byte];
    return compute_step(state, byte);
  }
  StateId step(StateId state, std::string_view bytes);
  StateId step_token(StateId state, TokenId token);

  // The bytes so far are a whole sentence.
  bool accepting(StateId state) const { return states_[state].accepting; }

  // Whole tokens that may come next (markup such as a tool call's opening tag).
  void append_tokens(StateId state, std::vector<TokenId>& tokens) const;

  // If the state stands in text: which kind, and how many more characters are sure to fit (kUnbounded: any
  // number). Given only when every token that is plain text of at most so many characters fits, and no longer
  // plain text does.
  struct Text {
    Grammar::TextKind kind;
    uint32_t room;
  };
  std::optional<Text> text(StateId state) const { return states_[state].text; }

  // To be called before each step of generation: forgets states if many were made (or if `force`), and starts a new
  // budget of work. Returns the number under which `state` lives on; all other numbers, start() excepted, are void if it
  // changed generation().
  StateId trim(StateId state, bool force = false);
  uint64_t generation() const { return generation_; }

  // Whether a state ever had more positions than are kept, so that something that fits may have been refused.
  bool has_dropped() const { return has_dropped_; }

 private:
  using NodeId = Grammar::NodeId;
  using StackId = uint32_t;
  static constexpr StateId kUnknown = UINT32_MAX;
  static constexpr StackId kEmptyStack = 0;
  static constexpr size_t kKeptStates = 2048;    // more than these: trim() forgets
  static constexpr size_t kMaxPositions = 4096;  // of one state
  // Room for a token of 255 bytes in the largest states after the most that trim() leaves; a step stays below 100 MB.
  static constexpr size_t kMaxTotalPositions = 1'500'000;
  static constexpr size_t kMaxWork = 4'000'000;  // positions visited in one step of generation
  using Transitions = std::array<StateId, 256>;

  // A repeat that is under way: `count` rounds are complete.
  struct Frame {
    StackId parent = kEmptyStack;
    Grammar::EdgeId edge = Grammar::kNone;
    uint32_t count = 0;
    uint32_t depth = 0;
  };
  struct Position {
    NodeId node;
    StackId stack;
    bool operator==(const Position&) const = default;
    auto operator<=>(const Position&) const = default;
  };
  struct State {
    std::vector<Position> positions;  // ascending; those that take a byte or a token next
    bool accepting = false;
    std::optional<Text> text;
    std::unique_ptr<Transitions> transitions;
  };

  bool has_room() const {
    return states_.size() < kMaxStates && total_positions_ + kMaxPositions <= kMaxTotalPositions && work_ < kMaxWork;
  }
  StateId compute_step(StateId state, uint8_t byte);
  void reach(NodeId node, StackId stack);  // adds a position and all that follow without a byte, to gathered_
  void visit(Position position);
  StackId push(StackId parent, Grammar::EdgeId edge, uint32_t count);
  StateId intern();  // numbers the gathered positions; kDead if none, kUnknown if no number is left
  bool takes_only_quote(NodeId node) const;
  std::optional<Text> text_of(const std::vector<Position>& positions) const;
  void clear();

  std::shared_ptr<const Grammar> grammar_;
  std::vector<State> states_;
  std::vector<Frame> frames_;
  std::unordered_map<uint64_t, std::vector<StackId>> frame_index_;
  std::unordered_map<uint64_t, std::vector<StateId>> state_index_;
  size_t total_positions_ = 0;
  StateId start_ = kDead;
  uint64_t generation_ = 0;
  size_t work_ = 0;
  bool has_dropped_ = false;

  // Work space of reach() and intern().
  std::vector<Position> gathered_;
  std::vector<Position> pending_;
  std::vector<Position> visited_table_;  // open addressing; see visit()
  std::vector<uint32_t> visited_epoch_;
  uint32_t epoch_ = 0;
  size_t visited_count_ = 0;
  bool gathered_accepting_ = false;
};

}  // namespace calla
