// NS:: as far as <Foundation/Foundation.hpp> declares it.
#include "Foundation/Foundation.hpp"

#include "findings.h"

namespace NS {
namespace {
thread_local AutoreleasePool* innermost = nullptr;
}

Object* Object::retain() {
  references_.fetch_add(1, std::memory_order_relaxed);
  return this;
}

void Object::release() {
  if (references_.fetch_sub(1, std::memory_order_acq_rel) == 1) delete this;
}

Object* Object::autorelease() {
  AutoreleasePool::add(this);
  return this;
}

String* Object::description() const { return String::string("<object>", UTF8StringEncoding); }

AutoreleasePool* AutoreleasePool::alloc() { return new AutoreleasePool; }

AutoreleasePool* AutoreleasePool::init() {
  outer_ = innermost;
  innermost = this;
  return this;
}

void AutoreleasePool::add(Object* object) {
  if (innermost) {
    innermost->objects_.push_back(object);
    return;
  }
  softmetal::report_finding({softmetal::Fault::kBadCall,
                             "",
                             {},
                             "",
                             "",
                             "an object was autoreleased on a thread without an NS::AutoreleasePool; it leaks"});
}

void AutoreleasePool::release_all() {
  for (size_t i = 0; i < objects_.size(); ++i) objects_[i]->release();  // may autorelease more
  objects_.clear();
}

void AutoreleasePool::drain() { release(); }

AutoreleasePool::~AutoreleasePool() {
  while (innermost && innermost != this) innermost->release();  // inner pools go first, as in Foundation
  release_all();
  innermost = outer_;
}

String* String::string() { return string("", UTF8StringEncoding); }
String* String::string(const char* text, StringEncoding encoding) {
  return alloc()->init(text, encoding)->autorelease();
}
String* String::alloc() { return new String; }
String* String::init() { return this; }
String* String::init(const char* text, StringEncoding) {
  text_ = text;
  return this;
}

Error* Error::make(const std::string& domain, Integer code, const std::string& text) {
  auto* error = new Error;
  error->domain_ = domain;
  error->code_ = code;
  error->text_ = text;
  return error;
}
Error* Error::error(ErrorDomain domain, Integer code, Dictionary*) {
  return make(domain->utf8String(), code, domain->utf8String())->autorelease();
}
String* Error::domain() const { return String::string(domain_.c_str(), UTF8StringEncoding); }
String* Error::localizedDescription() const { return String::string(text_.c_str(), UTF8StringEncoding); }

Array* Array::array() { return (new Array)->autorelease(); }
Array* Array::array(const Object* const* objects, UInteger count) {
  Array* a = array();
  for (UInteger i = 0; i < count; ++i) a->add(const_cast<Object*>(objects[i]));
  return a;
}
void Array::add(Object* object) { objects_.push_back(object->retain()); }
Array::~Array() {
  for (Object* o : objects_) o->release();
}

Number* Number::number(double value) {
  auto* n = new Number;
  n->value_ = value;
  return n->autorelease();
}
Number* Number::number(int value) { return number(static_cast<double>(value)); }
Number* Number::number(bool value) { return number(value ? 1.0 : 0.0); }
Number* Number::number(unsigned int value) { return number(static_cast<double>(value)); }
Number* Number::number(long long value) { return number(static_cast<double>(value)); }

Dictionary* Dictionary::dictionary() { return (new Dictionary)->autorelease(); }
Dictionary* Dictionary::dictionary(const Object* object, const Object* key) { return dictionary(&object, &key, 1); }
Dictionary* Dictionary::dictionary(const Object* const* objects, const Object* const* keys, UInteger count) {
  Dictionary* d = dictionary();
  for (UInteger i = 0; i < count; ++i)
    d->entries_.emplace_back(const_cast<Object*>(keys[i])->retain(), const_cast<Object*>(objects[i])->retain());
  return d;
}
Object* Dictionary::find(const Object* key) const {
  for (const auto& [k, v] : entries_) {
    const auto* a = dynamic_cast<const String*>(k);
    const auto* b = dynamic_cast<const String*>(key);
    if (k == key || (a && b && a->isEqualToString(b))) return v;
  }
  return nullptr;
}
Dictionary::~Dictionary() {
  for (const auto& [k, v] : entries_) {
    k->release();
    v->release();
  }
}

URL* URL::fileURLWithPath(const String* path) {
  auto* url = new URL;
  url->path_ = path->utf8String();
  return url->autorelease();
}

ProcessInfo* ProcessInfo::processInfo() {
  static auto* info = new ProcessInfo;
  return info;
}
String* ProcessInfo::operatingSystemVersionString() const {
  return String::string("Version 26.4 (softmetal)", UTF8StringEncoding);
}
bool ProcessInfo::isOperatingSystemAtLeastVersion(OperatingSystemVersion version) const {
  return version.majorVersion < 26 || (version.majorVersion == 26 && version.minorVersion <= 4);
}

}  // namespace NS
