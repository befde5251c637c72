#pragma once
// Seconds and bytes per stage, summed over the steps since the last reset.
#include <array>
#include <chrono>
#include <cstdint>

namespace calla::cpu {

enum class Stage : uint8_t {
  kEmbed,
  kProjectGdn,
  kMixGdn,
  kProjectAttention,
  kPrepareAttention,
  kAttend,
  kProjectResidual,
  kRoute,
  kGroupRows,
  kExpertsUp,
  kExpertsDown,
  kHead,
  kPick,
};
inline constexpr int kStages = static_cast<int>(Stage::kPick) + 1;
const char* stage_name(Stage stage);

struct StageTime {
  int calls = 0;
  double seconds = 0;
  double bytes = 0;  // weights, states and KV rows read and written
};

class Profile {
 public:
  const StageTime& operator[](Stage stage) const { return times_[static_cast<int>(stage)]; }
  void reset() { times_ = {}; }

  // Times one stage from construction to destruction.
  class Scope {
   public:
    Scope(Profile& profile, Stage stage)
        : time_(profile.times_[static_cast<int>(stage)]), start_(std::chrono::steady_clock::now()) {}
    ~Scope() {
      ++time_.calls;
      time_.seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
    }
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;
    void add_bytes(size_t bytes) { time_.bytes += static_cast<double>(bytes); }

   private:
    StageTime& time_;
    std::chrono::steady_clock::time_point start_;
  };

 private:
  std::array<StageTime, kStages> times_;
};

}  // namespace calla::cpu
