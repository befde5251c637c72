#pragma once
// What can be switched off (`--ablate NAME`), and what tests set.
#include <string>
#include <vector>

namespace calla::metal {

// One flag for each mechanism of docs/metal.md; true: its control runs instead.
struct Ablations {
  bool fused_dequant = false;  // experts' weights expanded to memory by a pass of their own
  bool gpu_routing = false;    // the CPU reads the routing and groups the rows
  bool wide_tiles = false;     // always 16-row tiles
  bool register_scan = false;  // the GDN state goes through memory every 32 rows
  bool tensor_ops = false;     // simdgroup matrices on every chip
  bool row_parallel = false;   // output projections with one thread a row
  bool gpu_handover = false;   // every step is waited for
  bool concurrent = false;     // one dispatch after the other
  bool fused_chains = false;   // gate, up, SwiGLU; down, sum; q, k, v; conv, step, norm as kernels of their own
  bool coalesced_kv = false;   // a lane reads KV elements 32 apart
  bool gqa_packing = false;    // every query head reads its KV rows itself
  bool split_kv = false;       // the general attention layout at every length
};

// Throws UsageError for a name that is not in ablation_names().
Ablations parse_ablations(const std::vector<std::string>& names);
std::vector<std::string> ablation_names();

struct MetalTestOptions {
  int drop_barrier = -1;      // leave out this barrier of every step
  int fixed_block_from = 0;   // keys from which fixed blocks are used; 0: kFixedBlockFrom
  double work_limit = 0;      // multiply-adds of a command buffer and of an attention dispatch; 0: as shipped
  int tensor_check_rows = 0;  // rows of the start-up check of tensor operations; 0, or above max_rows: max_rows
};

}  // namespace calla::metal
