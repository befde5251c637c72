#pragma once
// <metal_atomic>: relaxed atomics, the only order that MSL accepts.
#include "softmetal/simd.h"

namespace metal {

enum memory_order { memory_order_relaxed, memory_order_seq_cst };
enum thread_scope {
  thread_scope_thread,
  thread_scope_simdgroup,
  thread_scope_threadgroup,
  thread_scope_device,
};

template <class T>
struct atomic {
  T value;
  atomic() = default;
  atomic(const atomic&) = delete;
  atomic& operator=(const atomic&) = delete;
};
using atomic_int = atomic<int>;
using atomic_uint = atomic<uint>;
using atomic_bool = atomic<bool>;
using atomic_float = atomic<float>;
using atomic_ulong = atomic<ulong>;

// The compiler's builtins rather than std::atomic_ref, in functions that are not instrumented: the checker hears of the
// access once, as an atomic.
namespace detail {
template <class T, class F>
[[gnu::noinline]] SOFTMETAL_UNCHECKED T atomic_update(volatile const atomic<T>* object, F next) {
  auto* address = const_cast<T*>(&object->value);
  softmetal::atomic_access(address, sizeof(T), softmetal::AtomicKind::kReadWrite, __builtin_return_address(0));
  T old, wanted;
  __atomic_load(address, &old, __ATOMIC_RELAXED);
  do {
    wanted = next(old);
  } while (!__atomic_compare_exchange(address, &old, &wanted, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
  return old;
}
}  // namespace detail

template <class T>
[[gnu::noinline]] SOFTMETAL_UNCHECKED T atomic_load_explicit(volatile const atomic<T>* object, memory_order) {
  auto* address = const_cast<T*>(&object->value);
  softmetal::atomic_access(address, sizeof(T), softmetal::AtomicKind::kLoad, __builtin_return_address(0));
  T value;
  __atomic_load(address, &value, __ATOMIC_RELAXED);
  return value;
}
template <class T>
[[gnu::noinline]] SOFTMETAL_UNCHECKED void atomic_store_explicit(volatile atomic<T>* object, std::type_identity_t<T> v,
                                                                 memory_order) {
  auto* address = const_cast<T*>(&object->value);
  softmetal::atomic_access(address, sizeof(T), softmetal::AtomicKind::kStore, __builtin_return_address(0));
  __atomic_store(address, &v, __ATOMIC_RELAXED);
}
template <class T>
inline T atomic_exchange_explicit(volatile atomic<T>* object, std::type_identity_t<T> v, memory_order) {
  return detail::atomic_update(object, [v](T) { return v; });
}
template <class T>
inline bool atomic_compare_exchange_weak_explicit(volatile atomic<T>* object, T* expected,
                                                  std::type_identity_t<T> desired, memory_order, memory_order) {
  const T wanted = *expected;
  const T old = detail::atomic_update(object, [=](T now) { return now == wanted ? desired : now; });
  *expected = old;
  return old == wanted;
}
#define SOFTMETAL_FETCH(name, expression)                                                                        \
  template <class T>                                                                                             \
  inline T atomic_fetch_##name##_explicit(volatile atomic<T>* object, std::type_identity_t<T> v, memory_order) { \
    return detail::atomic_update(object, [v](T now) { return static_cast<T>(expression); });                     \
  }
SOFTMETAL_FETCH(add, now + v)
SOFTMETAL_FETCH(sub, now - v)
SOFTMETAL_FETCH(and, now& v)
SOFTMETAL_FETCH(or, now | v)
SOFTMETAL_FETCH(xor, now ^ v)
SOFTMETAL_FETCH(min, now < v ? now : v)
SOFTMETAL_FETCH(max, now > v ? now : v)
#undef SOFTMETAL_FETCH

inline void atomic_thread_fence(mem_flags flags, memory_order order, thread_scope scope = thread_scope_device) {
  if (order == memory_order_seq_cst) softmetal::thread_fence(static_cast<uint>(flags), scope == thread_scope_device);
}

}  // namespace metal
