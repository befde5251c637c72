#include "backend/cuda/profile.h"

#include <cxxabi.h>

#include <algorithm>
#include <cstdlib>
#include <memory>

#include "backend/cuda/device.h"
#include "backend/cuda/state_log.h"

namespace calla::cuda {
namespace {

constexpr int kReplays = 12;  // whole turns of the states' logs, since only every so-many-th replay writes states
static_assert(kReplays % (kLogTokens + 1) == 0);
constexpr int kWarmUps = 2;

// "stream_kernel<4, 1>" of a mangled name: no result, namespaces or parameters.
std::string short_name(const char* mangled) {
  int status = 0;
  const std::unique_ptr<char, decltype(&std::free)> text(abi::__cxa_demangle(mangled, nullptr, nullptr, &status),
                                                         &std::free);
  std::string name = status == 0 ? text.get() : mangled;
  for (const char* noise : {"(anonymous namespace)::", "calla::cuda::", "calla::", "void "})
    for (size_t at = name.find(noise); at != std::string::npos; at = name.find(noise))
      name.erase(at, std::char_traits<char>::length(noise));
  // The parameters are the last pair of parentheses at depth 0 of the angle brackets.
  int depth = 0;
  for (size_t i = 0; i < name.size(); ++i) {
    if (name[i] == '<') ++depth;
    if (name[i] == '>') --depth;
    if (name[i] == '(' && depth == 0) return name.substr(0, i);
  }
  return name;
}

struct Link {
  cudaGraphNode_t node = nullptr;
  cudaGraphEdgeData edge{};  // from the node in front
};

// The nodes of a chain, first to last.
std::vector<Link> chain_of(cudaGraph_t graph) {
  size_t count = 0;
  cuda_check(cudaGraphGetNodes(graph, nullptr, &count), "nodes of a step");
  std::vector<cudaGraphNode_t> nodes(count);
  cuda_check(cudaGraphGetNodes(graph, nodes.data(), &count), "nodes of a step");
  std::vector<cudaGraphNode_t> front(count);
  std::vector<Link> links(count);
  std::vector<bool> has_next(count, false);
  const auto index_of = [&](cudaGraphNode_t node) {
    return static_cast<size_t>(std::find(nodes.begin(), nodes.end(), node) - nodes.begin());
  };
  for (size_t i = 0; i < count; ++i) {
    size_t n = 0;
    cuda_check(cudaGraphNodeGetDependencies(nodes[i], nullptr, nullptr, &n), "edges of a step");
    check(n <= 1, "a step is a chain of nodes");
    links[i].node = nodes[i];
    if (n == 0) continue;
    cuda_check(cudaGraphNodeGetDependencies(nodes[i], &front[i], &links[i].edge, &n), "edges of a step");
    has_next[index_of(front[i])] = true;
  }
  std::vector<Link> chain;
  auto at = static_cast<size_t>(std::find(has_next.begin(), has_next.end(), false) - has_next.begin());
  while (at < count) {
    chain.push_back(links[at]);
    at = front[at] == nullptr ? count : index_of(front[at]);
  }
  check(chain.size() == count, "a step is one chain of nodes");
  std::reverse(chain.begin(), chain.end());
  return chain;
}

double time_chain(const std::vector<Link>& links, cudaStream_t stream) {
  cudaGraph_t graph = nullptr;
  cuda_check(cudaGraphCreate(&graph, 0), "cudaGraphCreate");
  cudaGraphNode_t front = nullptr;
  for (const Link& link : links) {
    cudaKernelNodeParams params{};
    cuda_check(cudaGraphKernelNodeGetParams(link.node, &params), "kernel of a step");
    cudaGraphNode_t node = nullptr;
    cuda_check(cudaGraphAddKernelNode(&node, graph, nullptr, 0, &params), "copy a kernel of a step");
    cuda_check(cudaGraphKernelNodeCopyAttributes(node, link.node), "copy a kernel of a step");
    if (front != nullptr)
      cuda_check(cudaGraphAddDependencies(graph, &front, &node, &link.edge, 1), "copy a kernel of a step");
    front = node;
  }
  const Graph executable(graph);
  Event begin(cudaEventDefault), end(cudaEventDefault);
  double total = 0;
  for (int i = 0; i < kWarmUps + kReplays; ++i) {
    begin.record(stream);
    executable.launch(stream);
    end.record(stream);
    end.synchronize();
    float ms = 0;
    cuda_check(cudaEventElapsedTime(&ms, begin.get(), end.get()), "elapsed time");
    if (i >= kWarmUps) total += static_cast<double>(ms) * 1e-3;
  }
  return total / kReplays;
}

}  // namespace

void StepProfiler::add_bytes(cudaStream_t stream, double bytes) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  cudaGraph_t graph = nullptr;
  cuda_check(cudaStreamGetCaptureInfo(stream, &status, nullptr, &graph, nullptr, nullptr, nullptr),
             "capture of a step");
  check(status == cudaStreamCaptureStatusActive, "bytes are noted during a capture");
  size_t nodes = 0;
  cuda_check(cudaGraphGetNodes(graph, nullptr, &nodes), "nodes of a step");
  marks_.push_back({nodes, bytes});
}

std::vector<KernelTime> StepProfiler::measure(cudaGraph_t graph, cudaStream_t stream) const {
  struct Function {
    const void* function = nullptr;
    std::vector<Link> launches;
    double bytes = 0;
  };
  std::vector<Function> functions;
  double pending = 0;
  size_t mark = 0;
  const std::vector<Link> chain = chain_of(graph);
  for (size_t i = 0; i < chain.size(); ++i) {
    for (; mark < marks_.size() && marks_[mark].node <= i; ++mark) pending += marks_[mark].bytes;
    cudaGraphNodeType type{};
    cuda_check(cudaGraphNodeGetType(chain[i].node, &type), "node of a step");
    if (type != cudaGraphNodeTypeKernel) continue;
    cudaKernelNodeParams params{};
    cuda_check(cudaGraphKernelNodeGetParams(chain[i].node, &params), "kernel of a step");
    auto of =
        std::find_if(functions.begin(), functions.end(), [&](const Function& f) { return f.function == params.func; });
    if (of == functions.end()) of = functions.insert(functions.end(), {params.func, {}, 0});
    of->launches.push_back(chain[i]);
    of->bytes += std::exchange(pending, 0);
  }
  std::vector<KernelTime> times;
  for (const Function& f : functions) {
    const char* name = nullptr;
    cuda_check(cudaFuncGetName(&name, f.function), "name of a kernel");
    times.push_back({short_name(name), static_cast<int>(f.launches.size()), time_chain(f.launches, stream), f.bytes});
  }
  return times;
}

}  // namespace calla::cuda
