# Programs are built into bin/. `make help` lists the targets.
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := build

GO      ?= go
# For `make demo`: runc, crun, or none for plain processes. ARGS has more flags,
# also for `make bench`.
RUNTIME ?= runc
ARGS    ?=
# For `make test` and `make microbench`: the packages.
PACKAGES ?= ./...
# A test run has no time limit; after this time without progress it is killed.
IDLE     ?= 15m
# 1: run a failed test once more; if it passes then, report it as flaky.
AGAIN    ?=
# For `make fuzz`: the time per target.
FUZZTIME ?= 60s

# Without git or a repository, Go's build information has the version.
module  := github.com/peerlane/peerlane
version := $(shell git describe --tags --always --dirty 2>/dev/null)
commit  := $(shell git rev-parse HEAD 2>/dev/null)
# The commit's date, not today's: the same commit gives the same binaries.
date    := $(shell TZ=UTC0 git log -1 --date=format-local:%Y-%m-%dT%H:%M:%SZ --format=%cd 2>/dev/null)

stamp := $(if $(version),-X $(module)/cmd/version.version=$(version)) \
         $(if $(commit),-X $(module)/cmd/version.commit=$(commit)) \
         $(if $(date),-X $(module)/cmd/version.date=$(date))
build := $(GO) build -trimpath -buildvcs=false

# Go's defaults, without warnings about functions that NVIDIA's header calls deprecated, and with
# checks of buffers. Some compilers define the last one.
export CGO_CFLAGS ?= -O2 -g -Wno-deprecated-declarations -fstack-protector-strong -U_FORTIFY_SOURCE -D_FORTIFY_SOURCE=2

.PHONY: build
build: bin/peerlane bin/peerlane-relay bin/peerlane-hook bin/peerlane-runtime bin/libpeerlane.so bin/libnccl-net-peerlane.so bin/nixl/libplugin_PEERLANE.so bin/libpeerlane-cuda-sim.so bin/libpeerlane-softdevice.so ## build everything into bin/ (the default)

# Programs that link C have random addresses (PIE), and the linker's tables are read-only
# before the program begins. peerlane keeps its table of functions writable: the loader
# finds NVML's functions at their first call, or never without a driver. TestBinariesAreHardened
# checks this.
bin/peerlane: binding := lazy
bin/peerlane-relay: binding := now

# The go command decides which packages to build again, so make always calls it.
.PHONY: bin/peerlane bin/peerlane-relay bin/peerlane-hook bin/peerlane-runtime
bin/peerlane bin/peerlane-relay:
	@$(build) -buildmode=pie -ldflags '$(stamp) -extldflags "-Wl,-z,relro,-z,$(binding),-z,noexecstack"' -o $@ ./cmd/$(@F)
	@# The kernel lets no process of a relay's uid trace a program that this uid cannot read.
	@$(if $(filter bin/peerlane-relay,$@),chmod 0711 $@)

# The command of users, in packages and after make install: it runs topo and version itself, and
# executes the whole command for the rest (cmd/peerlane/delegate.go).
.PHONY: bin/front/peerlane
bin/front/peerlane:
	@mkdir -p $(@D)
	@$(build) -tags front -buildmode=pie -ldflags '$(stamp) -extldflags "-Wl,-z,relro,-z,lazy,-z,noexecstack"' -o $@ ./cmd/peerlane

# Runtimes start these programs before every container: static, so that they
# load no library of an image, and small, so that they start fast.
bin/peerlane-hook bin/peerlane-runtime:
	@CGO_ENABLED=0 $(build) -ldflags '-s -w $(stamp)' -o $@ ./cmd/$(@F)

# The package that looks for the library compiles it, so that both use the same
# flags.
bin/libpeerlane-cuda-sim.so: $(wildcard cuda/sim/libcuda/*) cuda/sim/library.go
	@$(GO) run ./cuda/sim/build $@

# For runs by hand on machines with GPUs: injects the simulator's faults into
# relays on real GPUs.
bin/libpeerlane-cuda-faults.so: $(wildcard cuda/sim/forward/*.c) cuda/sim/libcuda/fault.c cuda/driver.c cuda/driver.h
	@mkdir -p $(@D)
	@$(CC) -std=c11 -O2 -g -Wall -Wextra -fPIC -fvisibility=hidden -pthread \
		-DVARIABLES='"PEERLANE_FORWARD_"' -DcuGetErrorName=fault_error_name -DcuGetErrorString=fault_error_string -c -o $@.o cuda/sim/libcuda/fault.c
	@$(CC) -std=c11 -O2 -g -Wall -Wextra -fPIC -fvisibility=hidden -pthread -shared -Wl,-z,defs \
		-o $@.new cuda/sim/forward/forward.c cuda/driver.c $@.o -ldl
	@mv $@.new $@ && rm $@.o

# For demos, benchmarks and tests, beside the program: in no directory of the
# loader.
bin/libpeerlane-softdevice.so: $(wildcard relay/verbs/softdevice/libibverbs/*) relay/verbs/softdevice/softdevice.go relay/verbs/abi.h
	@$(GO) run ./relay/verbs/softdevice/build $@

# The library of programs in containers: the file libpeerlane.so.0, and a link to it.
bin/libpeerlane.so: $(wildcard relay/libpeerlane/source/* relay/wire/*.h) relay/libpeerlane/library.go
	@$(GO) run ./relay/libpeerlane/build $(@D)

# NCCL's plugin for NCCL_NET_PLUGIN=peerlane; it contains libpeerlane.
bin/libnccl-net-peerlane.so: $(wildcard relay/nccl/source/* relay/libpeerlane/source/* relay/wire/*.h) relay/nccl/plugin.go relay/libpeerlane/library.go
	@$(GO) run ./relay/nccl/build $(@D)

# NIXL's plugin, and forwarders to NIXL's own plugins, in a directory for NIXL_PLUGIN_DIR.
bin/nixl/libplugin_PEERLANE.so: $(wildcard relay/nixl/source/* relay/nixl/forward/* relay/libpeerlane/source/* relay/wire/*.h) relay/nixl/plugin.go relay/libpeerlane/library.go
	@$(GO) run ./relay/nixl/build $(@D)

.PHONY: man
man: bin/peerlane bin/peerlane-relay bin/peerlane-hook bin/peerlane-runtime ## make the man pages, in bin/man
	@$(GO) run ./packaging/manpages -bin bin -out bin/man

.PHONY: completions
completions: bin/peerlane ## make the completions of bash, zsh and fish, in bin/completions
	@mkdir -p bin/completions
	@bin/peerlane completion bash >bin/completions/peerlane
	@bin/peerlane completion zsh >bin/completions/_peerlane
	@bin/peerlane completion fish >bin/completions/peerlane.fish

.PHONY: demo-needs
demo-needs:
	@integration/prerequisites demo $(RUNTIME)

.PHONY: demo
demo: demo-needs build ## run two containers that exchange data through their relays (RUNTIME=runc|crun|none, ARGS=...)
	@bin/peerlane demo --runtime $(RUNTIME) $(ARGS)

.PHONY: test-needs
test-needs:
	@integration/prerequisites test

again = -flaky integration/flaky.txt $(if $(AGAIN),-again '$(1)')
# Tests wait more than they compute: twice as many packages as processors run at once, and
# in each package several parallel tests. bin/confine ends the processes and mounts of a
# test, and limits the time without output. Processes of the race detector would sleep for
# a second before they end.
confine    = bin/confine -idle $(IDLE) env GORACE=atexit_sleep_ms=0
host_tests = $(confine) $(GO) test -json -count=1 -vet=off -ldflags=-w -parallel 4 -timeout 0
# Packages run in this order: the slowest first.
longest = ./integration ./hook ./relay ./cmd/peerlane ./relay/libpeerlane ./relay/selftest ./relay/transport/verbs ./topo/planner ./topo/reader ./cmd/peerlane/doctor ./relay/nccl ./relay/nixl
# Packages whose code starts few goroutines or none, or whose tests run Peerlane's programs as
# separate processes, which the detector does not observe. `make test-race`, on the nightly
# list, includes these packages.
without_race = ./cdi ./cdi/engine/edit ./cdi/inject ./cmd/manual ./cmd/peerlane ./cmd/peerlane/bundle ./cmd/peerlane/testbed ./cmd/peerlane-hook ./cmd/peerlane-runtime ./cmd/terminal \
	./cmd/version ./cuda/conformance ./cuda/kernels ./config ./config/paths ./hook/sandbox ./integration \
	$(addprefix ./integration/,across documents exported fuzz licences mutation nccl nightly programs report testrun vm/pcitree vm/run vulncheck) \
	./packaging/... ./relay/launch ./relay/network/address ./relay/rdmatest ./relay/registration ./relay/ring ./relay/selftest \
	./relay/verbs/... ./relay/wire ./topo/...
all_packages = $(if $(filter ./...,$(PACKAGES)),$(longest)) $(PACKAGES)
# The tests of these packages wait longer than all others together, so several
# processes share them.
in_parts     = ./relay=4 ./integration=2 ./relay/libpeerlane=2
testrun      = bin/testrun -parts '$(in_parts)' $(if $(RACE),,-plain '$(without_race)') -p $(shell expr 2 \* $$(nproc))

vetting      = nice $(MAKE) --no-print-directory lint

# Programs that tests start are built once for all packages; test binaries are
# built if their code has changed.
.PHONY: bin/tests
bin/tests:
	@$(GO) run ./integration/programs/build bin/test-programs
	@$(GO) build -o bin/ ./integration/testrun
	@$(testrun) -build bin/tests $(all_packages)

.PHONY: test
test: test-needs build bin/tests ## vet, lint and test everything, with the race detector where goroutines run (PACKAGES=./topo/...)
	@CGO_ENABLED=0 $(GO) build -o bin/ ./integration/confine
	@$(GO) build -o bin/test-report ./integration/report
	@# Vetted beside the tests. Never from the cache, which knows nothing of runtimes
	@# and kernels. The report prints failures, and why a test was skipped; of a run
	@# of everything it demands the matrix's cells of this place. What testrun says by
	@# its status is in its events.
	@status=0; programs=$$(mktemp -d); trap 'rm -rf "$$programs"' EXIT; \
	cp bin/test-programs/* "$$programs"; export PEERLANE_TEST_PROGRAMS=$$programs; \
	$(vetting) >bin/lint.log 2>&1 & lint=$$!; \
	{ $(confine) $(testrun) bin/tests $(all_packages) || true; } \
		| bin/test-report $(call again,$(host_tests) -race -run "$$TESTS" "$$PACKAGE") $(if $(filter ./...,$(PACKAGES)),-matrix integration/matrix.txt -places host) || status=1; \
	wait $$lint || { cat bin/lint.log; status=1; }; exit $$status

.PHONY: test-cost
test-cost: test-needs build bin/tests ## run each test alone and print its processor seconds, for each package (PACKAGES=./relay)
	@programs=$$(mktemp -d); trap 'rm -rf "$$programs"' EXIT; \
	cp bin/test-programs/* "$$programs"; export PEERLANE_TEST_PROGRAMS=$$programs GORACE=atexit_sleep_ms=0; \
	$(testrun) -cost bin/tests $(all_packages)

.PHONY: test-race
test-race: ## make test with the race detector on in all packages
	@$(MAKE) --no-print-directory test RACE=1

.PHONY: engines-needs
engines-needs:
	@integration/prerequisites engines
	@$(GO) run -C integration/engines ./install

# The tests of an engine wait for their turn (integration/engines).
engine_tests = bin/confine -idle $(IDLE) $(GO) test -json -count=1 -vet=off -tags engines -parallel 32 -timeout 0

.PHONY: test-engines
test-engines: engines-needs build ## test in every container engine, as root (RUN=TestEngineRunsEachCase/podman-4.3)
	@CGO_ENABLED=0 $(GO) build -o bin/ ./integration/confine
	@$(GO) build -o bin/test-report ./integration/report
	@$(GO) vet -tags engines ./integration/engines
	@# Then what `make test` skips where these engines are not.
	@{ for tests in "$(or $(RUN),.) ./integration/engines" $(if $(RUN),,"^Test(DockerWithoutCDI.*|PodmanWith.*)$$ ./integration"); do \
		$(engine_tests) -run $$tests || true; \
	done; } | bin/test-report $(call again,$(engine_tests) -run "$$TESTS" "$$PACKAGE") -places engines $(if $(RUN),,-matrix integration/matrix.txt)

# For `make test-vm`: packages and tests, and the places; and for a shell.
PKG    ?=
RUN    ?=
PLACE  ?=
IMAGE  ?= small
GUESTS ?= 1

vm_places := vm-small,vm-full,vm-pair,vm-host

.PHONY: vm-needs
vm-needs:
	@integration/prerequisites vm

.PHONY: bin/vm-run
bin/vm-run:
	@$(GO) build -o $@ ./integration/vm/run

.PHONY: test-vm
# With the packages, which one of the places installs.
test-vm: vm-needs $(if $(PKG)$(RUN),,packages) build bin/libpeerlane-softdevice.so bin/vm-run ## test in virtual machines, as root (PKG=./hook RUN=TestContainerReachesRelay PLACE=vm-full)
	@$(GO) build -o bin/test-report ./integration/report
	@# Its status 1 says that tests failed, which is in their events.
	@{ bin/vm-run test $(if $(PLACE),--place $(PLACE)) $(if $(RUN),--run '$(RUN)') $(PKG) || test $$? = 1; } \
		| bin/test-report $(call again,bin/vm-run test --place "$$PLACE" --run "$$TESTS" "$$PACKAGE" || test $$? = 1) $(if $(PKG)$(RUN),-places $(or $(PLACE),$(if $(PKG),vm-small,$(vm_places))),-matrix integration/matrix.txt -places $(or $(PLACE),$(vm_places)))

.PHONY: vm-long
vm-long: vm-needs build bin/vm-run ## send 1 GiB between containers of two machines, over TCP and RoCE, with the faults of test-vm; then set clocks (BYTES=1073741824)
	@$(GO) build -o bin/test-report ./integration/report
	@{ bin/vm-run test --place vm-pair --run '^TestContainersOfTwoGuests(OverRoCE)?LoseNoMessage$$' --timeout 3h --env PEERLANE_VM_BYTES=$(or $(BYTES),1073741824) ./integration/vm/cases/pair || test $$? = 1; } | bin/test-report -v -places vm-pair
	@{ bin/vm-run test --place vm-small --run '^TestClockJumpsRelaysServe$$' --timeout 1h --env PEERLANE_VM_HEAVY=1 ./integration || test $$? = 1; } | bin/test-report -v -places vm-small

# Pairs for `make bench-verbs`.
PAIRS ?= 5

.PHONY: bench-verbs
bench-verbs: vm-needs build bin/vm-run ## measure relays and perftest in turn on the same software NICs (rxe) of two machines (PAIRS=5)
	@$(GO) build -o bin/test-report ./integration/report
	@{ bin/vm-run test --place vm-pair --run '^TestRelaysBesidePerftestReportRatio$$' --timeout 3h --env PEERLANE_VM_PAIRS=$(PAIRS) ./integration/vm/cases/pair || test $$? = 1; } | bin/test-report -v -places vm-pair

.PHONY: vm-shell
vm-shell: vm-needs build bin/vm-run ## open a root shell in a virtual machine (IMAGE=full GUESTS=2)
	@bin/vm-run shell --image $(IMAGE) --guests $(GUESTS) $(ARGS)

.PHONY: vm-capture
vm-capture: vm-needs build bin/vm-run ## write topo/recorded/host.txt from the guest's kernel
	@# Whether it is what it was does not matter here; nothing is there if it failed.
	@rm -rf bin/vm/vm-small
	@bin/vm-run test --place vm-small --run TestRecordedHostMatchesKernel ./integration/vm/cases/small >bin/vm-capture.log || true
	@cp bin/vm/vm-small/out/host.txt topo/recorded/host.txt || { cat bin/vm-capture.log; exit 1; }

.PHONY: packages-needs
packages-needs:
	@integration/prerequisites packages

.PHONY: packages
packages: packages-needs ## make deb and rpm packages of this commit in dist/, with their bill of materials
	@GO='$(GO)' STAMP='$(patsubst $(module)/cmd/version.version=%,$(module)/cmd/version.version=v$(shell packaging/version),$(stamp))' packaging/build dist amd64 arm64
	@packaging/check dist

# For `make install`: the prefix, and the directory in place of /.
PREFIX  ?= /usr/local
DESTDIR ?=

.PHONY: install
install: build bin/front/peerlane man completions ## install the files of the packages without a package manager (DESTDIR= PREFIX=/usr/local)
	@packaging/install bin '$(DESTDIR)' '$(PREFIX)'

packages_tests = bin/confine -idle $(IDLE) $(GO) test -json -count=1 -vet=off -tags packages -timeout 0

.PHONY: test-packages
test-packages: packages ## install, upgrade and remove the packages in clean trees, as root (RUN=TestDebianInstallsUpgradesAndPurges/trixie)
	@CGO_ENABLED=0 $(GO) build -o bin/ ./integration/confine
	@$(GO) build -o bin/test-report ./integration/report
	@$(GO) vet -tags packages ./integration/packages
	@# Alerts and dashboard, read by Prometheus' own parsers.
	@$(GO) test -C packaging/tools/rules -count=1 ./...
	@$(GO) test -C packaging/tools -count=1 ./...
	@{ $(packages_tests) -run "$(or $(RUN),.)" ./integration/packages || true; } | bin/test-report $(call again,$(packages_tests) -run "$$TESTS" "$$PACKAGE") -places packages $(if $(RUN),,-matrix integration/matrix.txt)

.PHONY: release
release: clean-dist ## make all files of a release in dist/, with checksums; needs the results of make nightly
	@$(GO) run ./integration/nightly -check docs/nightly.json
	@$(MAKE) --no-print-directory packages
	@packaging/release dist

.PHONY: clean-dist
clean-dist:
	@rm -rf dist

.PHONY: lint
lint: ## check gofmt, go vet, staticcheck, the complexity of functions, and the wording of comments, errors, names of tests and commits
	@unformatted=$$(gofmt -l .); \
	if [ -n "$$unformatted" ]; then echo "gofmt -w is needed on:"; echo "$$unformatted"; exit 1; fi
	@# With the tests that run in virtual machines and in container engines.
	@$(GO) vet -tags vm,engines,packages ./...
	@$(GO) vet -C kubernetes -tags cluster ./...
	@$(GO) tool staticcheck -tags vm,engines,packages ./...
	@staticcheck=$$($(GO) tool -n staticcheck); cd kubernetes && "$$staticcheck" -tags cluster ./...
	@$(GO) run ./integration/wording
	@$(GO) run ./integration/complexity -limits $(complexities)

complexities := integration/complexity/limits.txt

.PHONY: complexity
complexity: ## print for each package the most complex function, the longest parameter list, the largest struct and the struct with the most booleans
	@$(GO) run ./integration/complexity

.PHONY: complexity-update
complexity-update: ## lower the limits of simplified functions
	@$(GO) run ./integration/complexity -limits $(complexities) -update

# A separate Go module, because the hook and the relay must not link client-go.
.PHONY: test-kubernetes
test-kubernetes: bin/peerlane-kubelet ## vet and test the Kubernetes plugin against its APIs, without a cluster
	@$(GO) vet -C kubernetes ./...
	@$(GO) test -C kubernetes -count=1 ./...

.PHONY: cluster-needs
cluster-needs:
	@integration/prerequisites cluster
	@$(GO) run -C kubernetes/integration ./install

# The tests of a cluster are in one package, and run in sequence.
cluster_tests = bin/confine -idle $(IDLE) env PEERLANE_TEST_PROGRAMS=$(CURDIR)/bin/test-programs $(GO) test -C kubernetes -json -count=1 -vet=off -tags cluster -timeout 0

.PHONY: test-cluster
test-cluster: cluster-needs image ## test the Kubernetes plugin in clusters on this machine, as root (RUN=TestClusterPodsWithLanesExchange)
	@CGO_ENABLED=0 $(GO) build -o bin/ ./integration/confine
	@$(GO) build -o bin/test-report ./integration/report
	@$(GO) run ./integration/programs/build bin/test-programs
	@$(GO) vet -C kubernetes -tags cluster ./integration
	@{ $(cluster_tests) -run '$(or $(RUN),.)' ./integration || true; } \
		| bin/test-report -places cluster $(if $(RUN),,-matrix integration/matrix.txt)

.PHONY: bin/peerlane-kubelet
bin/peerlane-kubelet:
	@CGO_ENABLED=0 $(GO) build -C kubernetes -trimpath -buildvcs=false -ldflags '-s -w $(stamp)' -o ../$@ ./cmd/$(@F)

# The image of the DaemonSet, without a base image: peerlane-kubelet, which is static, and the files that
# its init container copies to hosts without packages.
.PHONY: image
image: build bin/front/peerlane bin/peerlane-kubelet ## write the image of the Kubernetes DaemonSet as an OCI layout, without a daemon: dist/image, and dist/image.tar
	@rm -rf bin/image && mkdir -p bin/image/usr/bin
	@cp bin/peerlane-kubelet bin/image/usr/bin/
	@packaging/install bin bin/image/payload /opt/peerlane
	@cd bin/image/payload/opt/peerlane && rm -rf share lib/systemd/user lib/sysusers.d lib/tmpfiles.d
	@$(GO) run ./packaging/image -name localhost/peerlane-kubelet:$(subst +,-,$(shell packaging/version)) -time $(shell git log -1 --format=%ct) -out dist bin/image

.PHONY: licences
licences: ## list the Go modules in use and their licences; make test fails for a licence that is not allowed
	@$(GO) run ./integration/licences

# For `make vulncheck`: another database, or file:///DIR for a copy of this one.
DB ?= https://vuln.go.dev

.PHONY: vulncheck
vulncheck: ## look up the known vulnerabilities of Go and of the modules in use (DB=URL)
	@$(GO) build -o bin/vulncheck ./integration/vulncheck
	@bin/vulncheck -db $(DB) -- -tags vm,engines ./...
	@bin/vulncheck -db $(DB) -- -C kubernetes -tags cluster ./...

.PHONY: fuzz
fuzz: ## fuzz every parser of untrusted input (FUZZTIME=60s each, RUN=hook.Fuzz)
	@$(GO) run ./integration/fuzz -go $(GO) -time $(FUZZTIME) -run '$(RUN)' ./...

# For `make mutation`: the packages of the table in docs/benchmarks/HISTORY.md, without relay. The rows of
# topo and relay have ARGS of their own.
mutated = $(if $(filter-out ./...,$(PACKAGES)),$(PACKAGES),$(mutated_packages))
mutated_packages = ./topo ./topo/virtualswitch ./topo/recorded ./topo/nvml ./topo/graph ./topo/reader ./topo/ncclxml ./topo/planner ./topo/picture \
	$(addprefix ./topo/internal/,bandwidths cpuset pci textfile lazyregexp) \
	$(addprefix ./hook/,hostnetwork generation lanes journal process hostconfig staging) \
	$(addprefix ./hook/internal/,ocispec cgroup handover admin unixsocket programs) \
	./config ./config/paths ./cdi/inject ./cdi/engine ./cdi/engine/edit ./relay/wire ./relay/packet

.PHONY: mutation
mutation: ## change the code of packages in small steps and list the changes that tests do not notice (PACKAGES=./topo/graph ARGS="-sample 100 -seed 1")
	@nice -n 12 $(GO) run ./integration/mutation $(ARGS) $(mutated)

# For `make soak-containers`: the number of containers, and of random lives; and
# for `make soak-relay`: the time. For both the seed that an earlier run
# printed.
N    ?= 1000
LIVES ?= 10000
TIME ?= 1h
SEED ?=

.PHONY: nightly
nightly: build ## run all cases that are too long for CI, one after the other, and write docs/nightly.json and the table of docs/benchmarks.md (RUN=fuzz)
	@$(GO) run ./integration/nightly -run '$(RUN)' -table docs/benchmarks.md docs/nightly.json

.PHONY: soak-containers
soak-containers: test-needs build ## start containers and kill their processes at random, and compare random lives with a model (N=1000 LIVES=10000 SEED=)
	@PEERLANE_SOAK_CONTAINERS=$(N) PEERLANE_LIVES=$(LIVES) PEERLANE_SOAK_SEED=$(SEED) $(GO) test -count=1 -v -timeout 6h -run '^(TestSoakLeavesNothing|TestLivesOfContainersMatchModel|TestContainerConnectsAsFirstAction|TestOverlappingRestartsKeepGenerationsApart)$$' ./integration

.PHONY: soak-relay
soak-relay: test-needs build ## run clients that exchange verified messages, kill clients and relays, and require that no resource grows (TIME=1h SEED=)
	@PEERLANE_SOAK_TIME=$(TIME) PEERLANE_SOAK_SEED=$(SEED) $(GO) test -count=1 -v -timeout 24h -run '^TestSoakOfRelaysLeaksNothing$$' ./integration

.PHONY: soak-faults
soak-faults: ## inject every fault into every CUDA call and system call of relays and clients, stop processes for 120 s, run 500 orders of receives over two slots, and 400 connects during a flood
	@PEERLANE_FAULTS=all PEERLANE_PATIENCE=120s PEERLANE_DEADLOCK_ROUNDS=500 PEERLANE_FLOOD_CONNECTS=400 $(GO) test -count=1 -v -timeout 2h -run '^(TestRelayCUDAFaultsEndOperationsWithErrors|TestRelaySystemCallFaultsEndOperationsWithErrors|TestClientCUDAFaultsReturnErrors|TestClientSystemCallFaultsReturnErrors|TestStoppedProcessIsNotTakenForDead|TestCommunicatorsOverTwoSlotsDoNotDeadlock|TestPeerSocketFloodHonestConnectsSucceed)$$' ./relay
	@PEERLANE_FAULTS=all $(GO) test -count=1 -v -timeout 1h -run '^TestLibraryCallFaultsReturnErrors$$' ./relay/libpeerlane

.PHONY: soak-network
soak-network: test-needs build ## test containers of two hosts, in network namespaces, with each failure of the network: loss, resets, black holes, MTU, interface, address
	@PEERLANE_NETWORK_FAULTS=1 $(GO) test -count=1 -v -timeout 30m -run '^(TestNetworkFaultsLoseNoMessage|TestContainersOfTwoHostsExchange|TestRailUnpluggedMovesConnections|TestOneOfTwoRailsIsPulled|TestBenchKilledEndsOtherSide)$$' ./integration

# For `make soak-model`: the number of programs; and for `make soak-reuse`: the
# number of operations.
PROGRAMS   ?= 10000
OPERATIONS ?= 1000000

.PHONY: soak-model
soak-model: ## compare random programs of clients with a model, race detector on (PROGRAMS=10000 of each route)
	@PEERLANE_RECONNECT_MUTANTS=all $(GO) test -count=1 -v -run '^TestReconnectMutantsAreDetected$$' ./relay/transport/verbs
	@PEERLANE_MODEL_PROGRAMS=$(PROGRAMS) $(GO) test -race -count=1 -v -timeout 12h -run '^TestModelMessagesMatchReceives$$' ./relay

.PHONY: soak-reuse
soak-reuse: ## reuse memory as soon as its operation has ended (OPERATIONS=1000000 of each route and kind of memory)
	@PEERLANE_REUSE=$(OPERATIONS) $(GO) test -count=1 -v -timeout 12h -run '^TestMemoryReusedAtOnceKeepsMessages$$' ./relay
	@PEERLANE_REUSE=$$(($(OPERATIONS) / 100)) $(GO) test -count=1 -v -timeout 12h -run '^TestMemoryReusedAtOnceWithLateCopiesKeepsMessages$$' ./relay

.PHONY: soak-nccl
soak-nccl: ## test NCCL's plugin with messages of up to 64 MiB, and ten times as many schedules
	@PEERLANE_NCCL_SOAK=1 $(GO) test -race -count=10 -v -timeout 2h -run 'Version|Requests|Mebibytes|Sanitizers|Receives' ./relay/nccl

# For `make soak-nixl`: the number of kills.
KILLS ?= 1000

.PHONY: soak-nixl
soak-nixl: ## kill relays and clients while an agent of NIXL's plugin reads (KILLS=1000)
	@PEERLANE_NIXL_KILLS=$(KILLS) $(GO) test -count=1 -v -timeout 4h -run '^TestPluginDeathOfPeerIsRemoteDisconnect$$' ./relay/nixl

# For `make soak-doctor`: the number of combinations of faults.
ROUNDS ?= 2000

.PHONY: soak-doctor
soak-doctor: ## combine faults of synthetic hosts at random, and require that peerlane doctor finds all of them (ROUNDS=2000)
	@PEERLANE_DOCTOR_ROUNDS=$(ROUNDS) $(GO) test -count=1 -v -timeout 2h -run '^TestCombinedFaultsAreEachFound$$' ./cmd/peerlane/doctor

# For `make soak-plan`: the number of hosts.
HOSTS ?= 10000

.PHONY: soak-plan
soak-plan: ## plan synthetic hosts of up to 256 GPUs and NICs, and compare the plans with the optimum and NCCL (HOSTS=10000)
	@PEERLANE_TEST_PLAN_HOSTS=$(HOSTS) $(GO) test -count=1 -v -timeout 4h -run '^TestPlan(OfAny|ByColumns|BeatsEvery)' ./topo/planner

.PHONY: sanitize
sanitize: ## run all tests of the C library with the address, undefined behaviour and thread sanitizers, and the race detector on relays
	@PEERLANE_MODEL_PROGRAMS=200 PEERLANE_RANDOM_ROUNDS=2000 $(GO) test -race -count=1 -v -timeout 4h ./relay/libpeerlane

.PHONY: bench
bench: build ## measure relays and raw copies, on GPUs or simulated (ARGS="--table routes -o json")
	@bin/peerlane bench --table all $(ARGS)

# Tests of relays for integration/gpus/run, rows faults and shares.
.PHONY: bin/gpu-relay-tests
bin/gpu-relay-tests: bin/libpeerlane-cuda-faults.so
	@$(GO) test -c -o $@ ./relay

# For runs by hand on machines with GPUs, beside peerlane, peerlane-hook and
# peerlane-relay.
.PHONY: bin/gpu-transfers
bin/gpu-transfers:
	@$(build) -ldflags '-s -w' -o $@ ./integration/gpus/transfers
	@$(build) -ldflags '-s -w' -o bin/traffic-client ./integration/traffic/client

# integration/nccl/run runs this on machines with GPUs and PyTorch, and tries
# plugins that implement one version of NCCL's interface, if present.
.PHONY: bin/gpu-nccl
bin/gpu-nccl:
	@$(build) -ldflags '-s -w $(stamp)' -o $@ ./integration/nccl
	@$(GO) run ./relay/nccl/build bin 8 9 10 11

.PHONY: microbench
microbench: build ## run Go's benchmarks; docs/benchmarks.md names the source of each figure
	@$(GO) test -run '^$$' -bench . -benchmem -timeout 30m $(PACKAGES)

.PHONY: clean
clean: ## remove the built files
	rm -rf bin dist

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
