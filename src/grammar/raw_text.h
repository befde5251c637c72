#pragma once
// The value of a tool call's parameter that is a string: it stands in the call as it is, without quotes or
// escapes.
#include "grammar/grammar.h"

namespace calla {

// A sub-automaton for what follows "<parameter=NAME>\n" up to and including "\n</parameter>": any UTF-8 text
// that cannot be mistaken for markup of the call, i.e. without "</parameter>", and without a line that begins
// with
// "</function>", "</tool_call>" or "<parameter=".
Grammar::NodeId add_raw_text(Grammar& grammar);

}  // namespace calla
