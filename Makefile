# The commands that people use; CMake presets (CMakePresets.json) do the work.
#   make chat    install what is missing, build, and talk to the bundled calla-tiny
#   make test    the same, then run the tests
#   make check   formatting, clang-tidy, and the tests under address and undefined-behaviour sanitizers
#   make tsan    the token loop and background copies under the thread sanitizer
#   make cuda    build with the CUDA backend, for NVIDIA cards (docs/cuda.md): build/cuda/calla
#   make metal   the Metal backend on a software Metal device (docs/softmetal.md); metal-full: what takes longer
#   make bench   build and measure this machine (calla bench --help for more)
#   make clean   remove everything that was built
JOBS ?= $(shell getconf _NPROCESSORS_ONLN)
CMAKE_BUILD = cmake --build --preset $(1) --parallel $(JOBS)

.PHONY: build chat test check format-check tidy asan tsan cuda metal metal-full bench clean setup setup-check format

setup:
	@scripts/setup.sh build

setup-check:
	@scripts/setup.sh check

build: setup
	cmake --preset release -DCALLA_TESTS=OFF
	$(call CMAKE_BUILD,release) --target calla

chat: build
	@build/calla chat

test: setup
	@scripts/python-env.sh
	cmake --preset release -DCALLA_TESTS=ON
	$(call CMAKE_BUILD,release)
	ctest --preset release --parallel $(JOBS)

check: setup-check format-check tidy asan

SOURCES = $(shell git ls-files '*.h' '*.cc' '*.cu' '*.cuh')

format: setup-check
	clang-format-14 -i $(SOURCES)

format-check: setup-check
	clang-format-14 --dry-run -Werror $(SOURCES)

tidy: setup-check
	cmake --preset release -DCALLA_TESTS=ON >/dev/null
	scripts/tidy.sh build $(JOBS)

asan: setup-check
	cmake --preset asan
	$(call CMAKE_BUILD,asan)
	ctest --preset asan --parallel $(JOBS) --exclude-regex "$(SLOW_UNDER_SANITIZERS)"

# The thread sanitizer looks at what has threads: the pool, the token loop, the cpu backend, the server.
tsan: setup-check
	cmake --preset tsan
	$(call CMAKE_BUILD,tsan) --target $(TSAN_TARGETS)
	ctest --preset tsan --parallel $(JOBS) --tests-regex "$(TSAN_TESTS)" --exclude-regex "$(SLOW_UNDER_SANITIZERS)"

cuda: setup
	cmake --preset cuda
	$(call CMAKE_BUILD,cuda) --target calla
	@echo "built build/cuda/calla; on a card: build/cuda/calla selftest -b cuda"

# On Linux all of the Metal backend but its speed can be checked, kernels and host code as they are shipped.
METAL_PROGRAM = calla
METAL_TARGETS = $(METAL_PROGRAM) create_test metal_units_test metal_conformance_test metal_step_test metal_real_widths_test \
  metal_golden_test
ifneq ($(shell uname),Darwin)
METAL_TARGETS += metal_bindings_test metal_counts
endif

metal: setup
	cmake --preset metal
	$(call CMAKE_BUILD,metal) --target $(METAL_TARGETS)
	ctest --preset metal --parallel $(JOBS) --label-regex '^metal$$' $(if $(METAL_SKIP),--exclude-regex '$(METAL_SKIP)')

metal-full: metal
	$(call CMAKE_BUILD,metal) --target metal_full_test
	ctest --preset metal --parallel $(JOBS) --label-regex '^metal-full$$' --timeout 7200

SLOW_UNDER_SANITIZERS = Golden|ActivationSum|LongText|tokenizer_reference|server_suite
TSAN_TARGETS = scheduler_test background_copies_test
TSAN_TESTS = SchedulerTest.*/cpu|BackgroundCopies

bench: build
	build/calla bench

clean:
	rm -rf build
