package integration_test

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/cmd/peerlane/bundle"
	"github.com/peerlane/peerlane/config"
	"github.com/peerlane/peerlane/hook/control"
	"github.com/peerlane/peerlane/integration/programs"
	"github.com/peerlane/peerlane/relay/launch"
)

// inspection returns the output of `peerlane relay inspect` for a container.
func (b *bed) inspection(c *container) control.Inspection {
	b.Helper()
	var list []control.Inspection
	if err := json.Unmarshal([]byte(b.mustPeerlane("relay", "inspect", c.id, "-o", "json")), &list); err != nil ||
		len(list) != 1 {
		b.Fatalf("%d generations, %v", len(list), err)
	}
	return list[0]
}

// The kernel's view of the relays of two containers that exchange data.
func TestRelaySandboxRestrictsProcess(t *testing.T) {
	beside(t)
	for _, runtimeName := range runtimes {
		t.Run(runtimeName, func(t *testing.T) {
			// Relays on route staged are on the network.
			b := newBed(t, runtimeName, func(c *config.Config) { c.Relay.Route = launch.RouteDirect })
			b.nics()
			a, z := b.streaming("stream", "rounds")
			users := map[int]bool{}
			for _, c := range []*container{a, z} {
				i := b.inspection(c)
				got := i.Sandbox.Relay
				if got == nil || i.Sandbox.Mode != config.SandboxAuto {
					t.Fatalf("sandbox %+v", i.Sandbox)
				}
				if got.UID == 0 || got.GID != got.UID || got.Capabilities != 0 || !got.NoNewPrivs || !got.Seccomp || !got.OwnRoot {
					t.Errorf("the relay's sandbox is %+v, missing %q", got, i.Sandbox.Missing)
				}
				users[got.UID] = true
				process := fmt.Sprintf("/proc/%d/", i.Status.Relay.PID)
				// /proc files of undumpable processes belong to root, proc_pid(5).
				if info, err := os.Stat(process + "environ"); err != nil || info.Sys().(*syscall.Stat_t).Uid != 0 {
					t.Errorf("the relay is dumpable: %+v, %v", info, err)
				}
				limits := read(t, process+"limits")
				if !strings.Contains(strings.Join(strings.Fields(limits), " "), "Max core file size 0 0") {
					t.Errorf("a relay may dump core: %s", limits)
				}
				// A mount of a container's file system would prevent the unmount.
				mounts := read(t, process+"mountinfo")
				if strings.Contains(mounts, "/bundles/") || strings.Contains(mounts, " / / ") &&
					!strings.Contains(mounts, " / / ro") {
					t.Errorf("mounts of the relay: %s", mounts)
				}
				table := b.mustPeerlane("relay", "inspect", c.id)
				for _, line := range []string{"sandbox", "capabilities none", "no_new_privs yes", "seccomp filter yes",
					"own root yes", "own network yes", "Landlock"} {
					if !strings.Contains(strings.Join(strings.Fields(strings.NewReplacer("│", " ", "|", " ").Replace(table)), " "),
						line) {
						t.Errorf("inspect does not show %q: %s", line, table)
					}
				}
			}
			if len(users) != 2 {
				t.Errorf("two relays have the uids %v", users)
			}
		})
	}
}

// Relays without admission on every server GPU stage in host memory. They create, seal and pin the
// memory and share it with the NIC from within the sandbox.
func TestBounceWorksInSandbox(t *testing.T) {
	beside(t)
	for _, runtimeName := range runtimes {
		t.Run(runtimeName, func(t *testing.T) {
			b := newBed(t, runtimeName, asItIs)
			b.nics()
			var none config.Size // the plan exists already
			b.Config.Staging.Limit = &none
			if err := b.Config.Write(b.Layout.ConfigFile()); err != nil {
				t.Fatal(err)
			}
			a, z := b.streaming("stream", "rounds")
			for _, c := range []*container{a, z} {
				i := b.inspection(c)
				if got := i.Sandbox.Relay; got == nil || got.UID == 0 || !got.Seccomp || !got.OwnRoot {
					t.Errorf("the relay's sandbox is %+v, missing %q", got, i.Sandbox.Missing)
				}
				var host, gpu uint64
				for _, s := range i.Report.Staging {
					if s.Host {
						host += s.Bytes
					} else {
						gpu += s.Bytes
					}
				}
				if host != 64<<20 || gpu != 0 || i.Report.Staged == 0 { // 32 slots of 1 MiB in each direction
					t.Errorf("staging is %+v, %d bytes were staged", i.Report.Staging, i.Report.Staged)
				}
				if stat, err := os.ReadFile(i.Cgroup + "/memory.stat"); err == nil { // if cgroup v2 has the memory controller
					var shmem uint64
					for line := range strings.Lines(string(stat)) {
						_, _ = fmt.Sscanf(line, "shmem %d", &shmem) // other lines do not match
					}
					if shmem < 8<<20 {
						t.Errorf("shared memory in the control group: %d bytes", shmem)
					}
				}
				table := b.mustPeerlane("relay", "inspect", c.id)
				lane := i.Config.Lanes[0].GPU.BusID
				for _, want := range []string{"64 MiB in host memory for transport tcp: the lane of " + lane,
					"0 B (staging.limit)"} {
					if !strings.Contains(table, want) {
						t.Errorf("inspect does not say %q: %s", want, table)
					}
				}
				log := read(t, filepath.Join(b.Layout.GenerationDir(i.Generation.ID), "relay.log"))
				if strings.Count(log, "bounce: host memory, registered by ibv_reg_mr") != 1 {
					t.Errorf("want one line in the log: %s", log)
				}
			}
		})
	}
}

// For a container with a memory limit of 48 MiB a relay allocates at most a quarter of the limit as
// host memory, regardless of requests, and stays below 64 MiB in total.
func TestHostMemoryOfASmallContainerIsBounded(t *testing.T) {
	beside(t)
	const limit, bound = 48 << 20, 64 << 20
	for _, runtimeName := range runtimes {
		t.Run(runtimeName, func(t *testing.T) {
			b := newBed(t, runtimeName, asItIs)
			b.nics()
			memory := int64(limit)
			b.edit = func(built *bundle.Bundle) {
				built.Spec.Linux.Resources.Memory = &specs.LinuxMemory{Limit: &memory}
			}
			c := b.start(b.lanes[0], "hoard")
			hoarded := c.next("hoarded")
			i := b.inspection(c)
			if i.Config.OwnHostMemory != limit/4 {
				t.Errorf("the relay's limit is %d bytes", i.Config.OwnHostMemory)
			}
			allocated := relayMemory(t, i.Status.Relay.PID)
			t.Logf("the relay has %d KiB of memory for its container; it refused the rest: %s", allocated>>10, hoarded.Error)
			if allocated > bound || allocated > limit/4 || allocated < limit/8 {
				t.Errorf("the relay allocated %d bytes for a container of %d, want at most %d", allocated, limit, bound)
			}
			resident := relayResident(t, i.Status.Relay.PID)
			t.Logf("/proc/PID/smaps has %d KiB of anonymous and shared memory", resident>>10)
			if resident > bound {
				t.Errorf("the relay has %d bytes of memory in /proc/PID/smaps, want at most %d", resident, bound)
			}
			if stat, err := os.ReadFile(i.Cgroup + "/memory.stat"); err == nil { // cgroup v2 with the memory controller
				var anonymous, shared uint64
				for line := range strings.Lines(string(stat)) {
					_, _ = fmt.Sscanf(line, "anon %d", &anonymous) // other lines do not match
					_, _ = fmt.Sscanf(line, "shmem %d", &shared)
				}
				t.Logf("its control group, with its supervisor and its simulated GPUs, has %d KiB anonymous, %d KiB shared",
					anonymous>>10, shared>>10)
				if anonymous+shared > bound || anonymous == 0 {
					t.Errorf("the relay's control group counts %d bytes of anonymous and %d of shared memory, want at most %d",
						anonymous, shared, bound)
				}
			} else if os.Getenv(programs.Variable) != "" {
				t.Errorf("the guest's control groups do not count memory: %v", err)
			}
			if !strings.Contains(hoarded.Error, "a quarter of the container's memory limit") {
				t.Errorf("the relay refuses more by %q", hoarded.Error)
			}
			if table := b.mustPeerlane("relay", "inspect", c.id); !strings.Contains(table,
				"12 MiB for clients, slots and rings together") {
				t.Errorf("inspect does not show the limit: %s", table)
			}
		})
	}
}

// The kernel charges host memory of a client to the container's control group, because the
// client allocates the pages. The relay's control group does not have the pages.
func TestHostMemoryIsChargedToTheContainer(t *testing.T) {
	beside(t)
	const limit = 48 << 20
	for _, runtimeName := range runtimes {
		t.Run(runtimeName, func(t *testing.T) {
			b := newBed(t, runtimeName, asItIs)
			b.nics()
			memory := int64(limit)
			b.edit = func(built *bundle.Bundle) {
				built.Spec.Linux.Resources.Memory = &specs.LinuxMemory{Limit: &memory}
			}
			c := b.start(b.lanes[0], "hoard")
			c.next("hoarded")
			i := b.inspection(c)
			allocated := relayMemory(t, i.Status.Relay.PID)
			shared, current := memoryOf(t, i.Generation.Init.PID)
			t.Logf("the relay made %d KiB; the container's control group has %d KiB of shared memory, and %d KiB in all",
				allocated>>10, shared>>10, current>>10)
			// The relay touches some pages of rings before the client maps them.
			const rings = 1 << 20
			if allocated < limit/8 || shared+rings < allocated || current < shared {
				t.Errorf("the container's control group has %d bytes of shared memory and %d in total; the relay allocated %d",
					shared, current, allocated)
			}
			relay, _ := memoryOf(t, i.Status.Relay.PID)
			if os.Getenv(programs.Variable) != "" { // on the host all tests share the control group
				simulated := memfds(t, i.Status.Relay.PID, func(name string) bool {
					return strings.HasPrefix(name,
						"peerlane-sim-gpu")
				})
				t.Logf("the relay's control group has %d KiB of shared memory, of which simulated GPUs have up to %d KiB",
					relay>>10, simulated>>10)
				if relay > simulated+allocated/2 {
					t.Errorf("the relay's control group has %d bytes of shared memory and simulated GPUs %d, of %d that the relay "+
						"made for clients", relay, simulated, allocated)
				}
			}
		})
	}
}

// memoryOf returns shared memory and total memory of the control group of a process, in bytes, for
// cgroup v1 or v2.
func memoryOf(t *testing.T, pid int) (shared, current uint64) {
	t.Helper()
	for line := range strings.Lines(read(t, fmt.Sprintf("/proc/%d/cgroup", pid))) {
		f := strings.SplitN(strings.TrimSpace(line), ":", 3)
		group, usage := "/sys/fs/cgroup"+f[2], "memory.current"
		switch {
		case f[1] == "memory":
			group, usage = "/sys/fs/cgroup/memory"+f[2], "memory.usage_in_bytes"
		case f[1] != "":
			continue
		}
		text, err := os.ReadFile(filepath.Join(group, usage))
		if err != nil { // v1 has the controller
			continue
		}
		if current, err = strconv.ParseUint(strings.TrimSpace(string(text)), 10, 64); err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(read(t, filepath.Join(group, "memory.stat"))) {
			_, _ = fmt.Sscanf(line, "shmem %d", &shared) // other lines do not match
		}
		return shared, current
	}
	t.Fatalf("no control group with the memory controller has process %d", pid)
	return 0, 0
}

// relayMemory sums the pages, in bytes, of the shared memory that a relay has open and
// that is not a simulated GPU's. /proc/PID/smaps lacks pages that the relay has not touched.
func relayMemory(t *testing.T, pid int) uint64 {
	t.Helper()
	return memfds(t, pid, func(name string) bool {
		return strings.HasPrefix(name, "peerlane-") && !strings.HasPrefix(name, "peerlane-sim-gpu")
	})
}

// memfds sums the pages, in bytes, of the memfds that a process has open and whose names match.
func memfds(t *testing.T, pid int, matches func(name string) bool) uint64 {
	t.Helper()
	files, err := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", pid))
	if err != nil {
		t.Fatal(err)
	}
	pages := map[uint64]uint64{} // by inode
	for _, file := range files {
		var stat unix.Stat_t
		link, err := os.Readlink(file)
		if name, ok := strings.CutPrefix(link, "/memfd:"); err != nil || !ok || !matches(name) {
			continue
		}
		if unix.Stat(file, &stat) != nil { // closed meanwhile
			continue
		}
		pages[stat.Ino] = uint64(stat.Blocks) * 512
	}
	var sum uint64
	for _, bytes := range pages {
		sum += bytes
	}
	return sum
}

// relayResident sums the resident memory, in bytes, that is anonymous or shared and not a
// simulated GPU's.
func relayResident(t *testing.T, pid int) (sum uint64) {
	t.Helper()
	counts := false
	for line := range strings.Lines(read(t, fmt.Sprintf("/proc/%d/smaps", pid))) {
		f := strings.Fields(line)
		switch {
		case len(f) >= 5 && strings.Contains(f[0], "-"): // a mapping: range, permissions, offset, device, inode, name
			name := ""
			if len(f) > 5 {
				name = f[5]
			}
			counts = !strings.HasPrefix(name, "/") || strings.HasPrefix(name, "/memfd:") &&
				!strings.HasPrefix(name, "/memfd:peerlane-sim-gpu")
		case counts && len(f) == 3 && f[0] == "Rss:":
			kilobytes, err := strconv.ParseUint(f[1], 10, 64)
			if err != nil {
				t.Fatal(err)
			}
			sum += kilobytes << 10
		}
	}
	return sum
}

// Relays run without a sandbox, which helps to find a fault.
func TestRelaysWithoutSandboxServe(t *testing.T) {
	beside(t)
	b := newBed(t, "runc", func(c *config.Config) { c.Relay.Sandbox = config.SandboxOff })
	b.nics()
	a, _ := b.streaming("stream", "rounds")
	if s := b.inspection(a).Sandbox; s.Mode != config.SandboxOff || s.Relay == nil || s.Relay.UID != 0 ||
		s.Relay.OwnRoot || s.Relay.Seccomp {
		t.Errorf("sandbox %+v, the relay %+v", s, s.Relay)
	}
}

func read(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}
