// A libcuda.so.1 that only knows its version and how cuInit() fails, both from the environment: what the program says
// without a usable card can be tested on any machine. With IMITATED_TELLS it says on stderr when it is asked.
#include <cstdio>
#include <cstdlib>
#include <cstring>

extern "C" {

static int number(const char* name) {
  const char* text = std::getenv(name);
  return text != nullptr ? std::atoi(text) : 0;
}
static int init(unsigned) { return number("IMITATED_INIT"); }
static int version(int* out) {
  if (std::getenv("IMITATED_TELLS") != nullptr) std::fputs("the driver is asked\n", stderr);
  return *out = number("IMITATED_VERSION"), 0;
}
static int anything_else() { return 999; }  // CUDA_ERROR_UNKNOWN

// The one symbol that the runtime asks for by name.
int cuGetProcAddress_v2(const char* symbol, void** out, int, unsigned long, int* found) {
  if (found != nullptr) *found = 0;  // CU_GET_PROC_ADDRESS_SUCCESS
  if (std::strcmp(symbol, "cuInit") == 0) {
    *out = reinterpret_cast<void*>(init);
  } else if (std::strcmp(symbol, "cuDriverGetVersion") == 0) {
    *out = reinterpret_cast<void*>(version);
  } else if (std::strncmp(symbol, "cuGetProcAddress", 16) == 0) {
    *out = reinterpret_cast<void*>(cuGetProcAddress_v2);
  } else {
    *out = reinterpret_cast<void*>(anything_else);
  }
  return 0;
}

}  // extern "C"
