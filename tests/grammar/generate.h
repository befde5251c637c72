#pragma once
// A stand-in for a model under a constraint: tokens picked at random.
#include <random>
#include <string>

#include "engine/generation.h"
#include "tests/grammar/vocabulary.h"

namespace calla {

// Picks any allowed token `wild_steps` times, then tokens that lead to the end soon, until the stop token. On
// failure returns a text that begins with "dead end" or "no end".
std::string generate(TokenConstraint& constraint, const TestVocabulary& vocabulary, int wild_steps,
                     std::mt19937_64& random);

}  // namespace calla
