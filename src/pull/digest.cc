#include "pull/digest.h"

#include <openssl/evp.h>

#include "base/check.h"

namespace calla {

void Digest::Free::operator()(void* context) const { EVP_MD_CTX_free(static_cast<EVP_MD_CTX*>(context)); }

Digest::Digest(Kind kind) : context_(EVP_MD_CTX_new()) {
  const EVP_MD* type = kind == Kind::kSha256 ? EVP_sha256() : EVP_sha1();
  check(context_ != nullptr && EVP_DigestInit_ex(static_cast<EVP_MD_CTX*>(context_.get()), type, nullptr) == 1,
        "cannot start a hash");
}

void Digest::update(const void* data, size_t bytes) {
  check(EVP_DigestUpdate(static_cast<EVP_MD_CTX*>(context_.get()), data, bytes) == 1, "cannot update a hash");
}

std::string Digest::finish() {
  unsigned char bytes[EVP_MAX_MD_SIZE];
  unsigned length = 0;
  check(EVP_DigestFinal_ex(static_cast<EVP_MD_CTX*>(context_.get()), bytes, &length) == 1, "cannot finish a hash");
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (unsigned i = 0; i < length; ++i) {
    text.push_back(kDigits[bytes[i] >> 4]);
    text.push_back(kDigits[bytes[i] & 15]);
  }
  return text;
}

}  // namespace calla
