#pragma once
// The part of metal-cpp's Foundation that an engine needs, under the same names and signatures, for Linux.
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

using CFTimeInterval = double;

namespace NS {

using Integer = std::intptr_t;
using UInteger = std::uintptr_t;
using TimeInterval = double;

enum StringEncoding : UInteger { ASCIIStringEncoding = 1, UTF8StringEncoding = 4 };

class String;
using ErrorDomain = String*;

// Reference-counted base of everything. Objects start with one reference.
class Object {
 public:
  Object() = default;
  Object(const Object&) = delete;
  Object& operator=(const Object&) = delete;
  Object* retain();
  void release();
  Object* autorelease();
  UInteger retainCount() const { return references_; }
  String* description() const;

 protected:
  virtual ~Object() = default;

 private:
  std::atomic<UInteger> references_{1};
};

// metal-cpp gives retain() and friends the class's own type.
template <class Class, class Base = Object>
class Referencing : public Base {
 public:
  Class* retain() { return static_cast<Class*>(Object::retain()); }
  Class* autorelease() { return static_cast<Class*>(Object::autorelease()); }
};

// Releases what was autoreleased on this thread since it was made, when it is itself released.
class AutoreleasePool : public Object {
 public:
  static AutoreleasePool* alloc();
  AutoreleasePool* init();
  void drain();
  static void add(Object* object);  // to the thread's innermost pool; without one: a finding

 protected:
  ~AutoreleasePool() override;

 private:
  void release_all();
  std::vector<Object*> objects_;
  AutoreleasePool* outer_ = nullptr;
};

class String : public Referencing<String> {
 public:
  static String* string();
  static String* string(const char* text, StringEncoding encoding);
  static String* alloc();
  String* init();
  String* init(const char* text, StringEncoding encoding);
  const char* utf8String() const { return text_.c_str(); }
  const char* cString(StringEncoding) const { return text_.c_str(); }
  UInteger length() const { return text_.size(); }
  UInteger lengthOfBytes(StringEncoding) const { return text_.size(); }
  bool isEqualToString(const String* other) const { return text_ == other->text_; }

 private:
  std::string text_;
};

#define MTLSTR(literal) (NS::String::string(literal, NS::UTF8StringEncoding))

class Error : public Referencing<Error> {
 public:
  static Error* error(ErrorDomain domain, Integer code, class Dictionary* user_info);
  Integer code() const { return code_; }
  String* domain() const;
  String* localizedDescription() const;
  static Error* make(const std::string& domain, Integer code, const std::string& text);  // softmetal's own

 private:
  std::string domain_;
  std::string text_;
  Integer code_ = 0;
};

class Array : public Referencing<Array> {
 public:
  static Array* array();
  static Array* array(const Object* const* objects, UInteger count);
  UInteger count() const { return objects_.size(); }
  template <class T = Object>
  T* object(UInteger index) const {
    return static_cast<T*>(objects_.at(index));
  }
  void add(Object* object);  // softmetal's own; retains

 protected:
  ~Array() override;

 private:
  std::vector<Object*> objects_;
};

class Number : public Referencing<Number> {
 public:
  static Number* number(int value);
  static Number* number(bool value);
  static Number* number(unsigned int value);
  static Number* number(long long value);
  static Number* number(double value);
  int intValue() const { return static_cast<int>(value_); }
  double doubleValue() const { return value_; }

 private:
  double value_ = 0;
};

class Dictionary : public Referencing<Dictionary> {
 public:
  static Dictionary* dictionary();
  static Dictionary* dictionary(const Object* object, const Object* key);
  static Dictionary* dictionary(const Object* const* objects, const Object* const* keys, UInteger count);
  UInteger count() const { return entries_.size(); }
  template <class T = Object>
  T* object(const Object* key) const {
    return static_cast<T*>(find(key));
  }

 protected:
  ~Dictionary() override;

 private:
  Object* find(const Object* key) const;
  std::vector<std::pair<Object*, Object*>> entries_;
};

class URL : public Referencing<URL> {
 public:
  static URL* fileURLWithPath(const String* path);
  const char* fileSystemRepresentation() const { return path_.c_str(); }

 private:
  std::string path_;
};

struct Range {
  static Range Make(UInteger location, UInteger length) { return {location, length}; }
  UInteger location;
  UInteger length;
};

class ProcessInfo : public Referencing<ProcessInfo> {
 public:
  static ProcessInfo* processInfo();
  String* operatingSystemVersionString() const;
  bool isOperatingSystemAtLeastVersion(struct OperatingSystemVersion version) const;
};
struct OperatingSystemVersion {
  Integer majorVersion;
  Integer minorVersion;
  Integer patchVersion;
};

template <class T>
class SharedPtr {
 public:
  SharedPtr() = default;
  SharedPtr(std::nullptr_t) {}
  SharedPtr(const SharedPtr& o) : object_(o.object_) {
    if (object_) object_->retain();
  }
  SharedPtr(SharedPtr&& o) noexcept : object_(std::exchange(o.object_, nullptr)) {}
  template <class U>
  SharedPtr(const SharedPtr<U>& o) : object_(o.get()) {
    if (object_) object_->retain();
  }
  template <class U>
  SharedPtr(SharedPtr<U>&& o) : object_(o.get()) {
    o.detach();
  }
  ~SharedPtr() { reset(); }
  SharedPtr& operator=(const SharedPtr& o) {
    SharedPtr copy(o);
    std::swap(object_, copy.object_);
    return *this;
  }
  SharedPtr& operator=(SharedPtr&& o) noexcept {
    std::swap(object_, o.object_);
    return *this;
  }
  void reset() {
    if (object_) object_->release();
    object_ = nullptr;
  }
  T* get() const { return object_; }
  T* operator->() const { return object_; }
  explicit operator bool() const { return object_ != nullptr; }
  void detach() { object_ = nullptr; }

 private:
  template <class U>
  friend SharedPtr<U> TransferPtr(U* object);
  T* object_ = nullptr;
};

template <class T>
SharedPtr<T> TransferPtr(T* object) {
  SharedPtr<T> p;
  p.object_ = object;
  return p;
}
template <class T>
SharedPtr<T> RetainPtr(T* object) {
  if (object) object->retain();
  return TransferPtr(object);
}
template <class T, class U>
bool operator==(const SharedPtr<T>& a, const SharedPtr<U>& b) {
  return a.get() == b.get();
}

}  // namespace NS
