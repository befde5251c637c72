"""The C++ table that follows a translated file: thunks, arguments, function constants, the source text."""
CONSTANT_TYPES = {
    "bool": "kBool", "char": "kChar", "int8_t": "kChar", "uchar": "kUChar", "uint8_t": "kUChar", "short": "kShort",
    "int16_t": "kShort", "ushort": "kUShort", "uint16_t": "kUShort", "int": "kInt", "int32_t": "kInt",
    "uint": "kUInt", "uint32_t": "kUInt", "half": "kHalf", "float": "kFloat", "long": "kLong", "int64_t": "kLong",
    "ulong": "kULong", "uint64_t": "kULong",
}


def quoted(text):
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def source_literal(text):
    """The file's text as adjacent raw strings (a compiler limits the length of one)."""
    pieces = [text[i:i + 8000] for i in range(0, len(text), 8000)] or [""]
    return "\n".join(f'R"softmetal({piece})softmetal"' for piece in pieces)


def table(translation, library, source, source_text):
    out = ['\n#line 1 "softmetal table"\n', "namespace {\nnamespace softmetal_table {\n", "using namespace metal;\n"]
    instances = []
    for number_, instance in enumerate(translation.instances):
        kernel = instance.kernel
        arguments, infos = [], []
        for p in kernel.parameters:
            if p.builtin:
                arguments.append(f"::softmetal::{p.builtin}(in)")
                continue
            if p.kind == "threadgroup":
                value = f"::softmetal::PointerArgument{{::softmetal::bound_threadgroup_memory(in, {p.index})}}"
            elif p.reference:
                value = f"::softmetal::ReferenceArgument{{in, {p.index}}}"
            else:
                value = f"::softmetal::PointerArgument{{::softmetal::bound_buffer(in, {p.index})}}"
            arguments.append(value)
            kind = "kThreadgroup" if p.kind == "threadgroup" else "kBuffer"
            guard = f"&{p.guard}" if p.guard else "nullptr"
            infos.append(f"{{::softmetal::ArgumentKind::{kind}, {p.index}, {quoted(p.name)}, {quoted(p.type)}, "
                         f"{str(p.writable).lower()}, {str(p.constant).lower()}, {guard}}},")
        out.append(f"void run_{number_}([[maybe_unused]] const ::softmetal::Invocation& in) {{\n"
                   f"  {instance.expression}({', '.join(arguments)});\n}}\n")
        out.append(f"const ::softmetal::ArgumentInfo arguments_{number_}[] = {{{' '.join(infos)} {{}}}};\n")
        constants = translation.required_constants(kernel)
        out.append(f"const char* const constants_{number_}[] = {{"
                   + "".join(quoted(c) + ", " for c in constants) + "nullptr};\n")
        required = (kernel.required_threads + ["1", "1"])[:3] if kernel.required_threads else ["0", "0", "0"]
        instances.append(
            f"  {{{quoted(instance.host_name)}, reinterpret_cast<const void*>(&{instance.expression}), &run_{number_}, "
            f"arguments_{number_}, {len(infos)}, {kernel.max_total_threads}, {{{', '.join(required)}}}, "
            f"constants_{number_}, {len(constants)}, {quoted(kernel.token.file)}, {kernel.token.line}}},")
    out.append("const ::softmetal::KernelInfo kernels[] = {\n" + "\n".join(instances) + "\n  {}};\n")
    constants = []
    for name, index, kind, _ in translation.constants:
        constants.append(f"  {{{quoted(name)}, {index}, ::softmetal::ConstantType::{CONSTANT_TYPES[kind]}, &{name}, "
                         f"&{name}_is_defined}},")
    out.append("const ::softmetal::FunctionConstant constants[] = {\n" + "\n".join(constants) + "\n  {}};\n")
    out.append("void derive() {\n" + "".join(f"  {n} = {v};\n" for n, v in translation.derived) + "}\n")
    out.append(f"const char source[] = {source_literal(source_text)};\n")
    out.append("const ::softmetal::RegisterUnit unit({" +
               f"{quoted(library)}, SOFTMETAL_INSTRUMENTED, {quoted(source)}, source, kernels, "
               f"{len(translation.instances)}, constants, {len(translation.constants)}, &derive, &source}});\n")
    out.append("}  // namespace softmetal_table\n}  // namespace\n")
    return "".join(out)
