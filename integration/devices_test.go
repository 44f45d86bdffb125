package integration_test

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/cdi"
	"github.com/peerlane/peerlane/cmd/peerlane/bundle"
	"github.com/peerlane/peerlane/config"
	"github.com/peerlane/peerlane/topo"
)

// device is the name of a GPU's device of a kind.
func device(kind string, g topo.GPU) string { return fmt.Sprintf("%s=%d", kind, g.Index) }

// lookIn runs a container with these devices and returns its view, and the running container.
func (b *bed) lookIn(built *bundle.Bundle) (*look, *container) {
	b.Helper()
	c := b.run(built)
	return c.next("look").Look, c
}

// variables returns the values of a variable of a process.
func (l *look) variables(name string) (values []string) {
	for _, e := range l.Environment {
		if value, found := strings.CutPrefix(e, name+"="); found {
			values = append(values, value)
		}
	}
	return values
}

// A device of a kind adds the edits of that kind only.
func TestContainerGetsRequestedDevices(t *testing.T) {
	beside(t)
	for _, runtimeName := range runtimes {
		t.Run(runtimeName, func(t *testing.T) {
			b := newBed(t, runtimeName, asItIs)
			b.leavesNothing()
			lane := b.lanes[0]
			g := b.gpu(lane)
			nic := b.nic(lane.NICs[0])
			gpuNodes := []string{"/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidiactl"}
			for _, address := range append([]string{lane.GPU}, lane.Servers...) {
				gpu, err := b.Plan.GPU(address)
				if err != nil {
					t.Fatal(err)
				}
				gpuNodes = append(gpuNodes, fmt.Sprintf("/dev/nvidia%d", gpu.Minor))
			}
			nicNodes := []string{"/dev/infiniband/rdma_cm", "/dev/infiniband/" + nic.Uverbs}
			allNICs := []string{"/dev/infiniband/rdma_cm"}
			for _, n := range b.Plan.NICs {
				allNICs = append(allNICs, "/dev/infiniband/"+n.Uverbs)
			}
			// The recorded host has the driver for DMA-BUF, but no kernel release.
			for _, test := range []struct {
				name         string
				devices      string
				nodes        []string
				relay        bool
				visible      []string
				registration []string
			}{
				{"lane", device(cdi.KindLane, g), nil, true, nil, nil},
				{"lane by UUID", cdi.KindLane + "=" + g.UUID, nil, true, nil, nil},
				{"lane by address", cdi.KindLane + "=" + g.BusID, nil, true, nil, nil},
				{"all lanes", cdi.KindLane + "=all", nil, true, nil, nil},
				{"gpu", device(cdi.KindGPU, g), slices.Concat(nicNodes, gpuNodes), true, []string{g.UUID},
					[]string{cdi.RegistrationBounce}},
				{"gpu, its lane and its NIC", device(cdi.KindLane, g) + " " + device(cdi.KindGPU, g) + " " + cdi.KindNIC + "=" +
					nic.Name, slices.Concat(nicNodes, gpuNodes), true, []string{g.UUID}, []string{cdi.RegistrationBounce}},
				{"all NICs", cdi.KindNIC + "=all", allNICs, false, nil, []string{cdi.RegistrationBounce}},
				{"nic", cdi.KindNIC + "=" + nic.Name, nicNodes, false, nil, []string{cdi.RegistrationBounce}},
				{"nic by address", cdi.KindNIC + "=" + nic.BusID, nicNodes, false, nil, []string{cdi.RegistrationBounce}},
			} {
				t.Run(test.name, func(t *testing.T) {
					found, c := b.lookIn(b.bundle(g, strings.Fields(test.devices), "look"))
					defer c.end()
					slices.Sort(test.nodes)
					slices.Sort(found.Nodes)
					if !slices.Equal(found.Nodes, test.nodes) {
						t.Errorf("the nodes are %q, want %q", found.Nodes, test.nodes)
					}
					if found.Relay != test.relay {
						t.Errorf("there is a relay: %v", found.Relay)
					}
					for name, want := range map[string][]string{"CUDA_VISIBLE_DEVICES": test.visible,
						cdi.RegistrationVariable: test.registration, "LD_LIBRARY_PATH": nil} {
						if got := found.variables(name); !slices.Equal(got, want) {
							t.Errorf("%s is %q, want %q", name, got, want)
						}
					}
				})
			}
		})
	}
}

func (b *bed) nic(name string) topo.NIC {
	b.Helper()
	i := slices.IndexFunc(b.Plan.NICs, func(n topo.NIC) bool { return n.Name == name })
	if i < 0 {
		b.Fatalf("the plan has no NIC %s", name)
	}
	return b.Plan.NICs[i]
}

// refused requires that a container does not start, and returns the hook's message. Some runtimes
// do not show the output of hooks.
func (b *bed) refused(built *bundle.Bundle) string {
	b.Helper()
	c := b.run(built)
	for s := range c.lines {
		b.Errorf("the container ran and said %+v", s)
	}
	c.end()
	return c.stderr.String()
}

func TestGPUDevicesHidingEachOtherAreRefused(t *testing.T) {
	beside(t)
	for _, runtimeName := range runtimes {
		t.Run(runtimeName, func(t *testing.T) {
			b := newBed(t, runtimeName, asItIs)
			b.leavesNothing()
			g, other := b.gpu(b.lanes[0]), b.gpu(b.lanes[1])
			if err := b.Configure(func(c *config.Config) {
				c.Groups = map[string][]string{"mine": {g.UUID,
					other.UUID}}
			}); err != nil {
				t.Fatal(err)
			}
			both := []string{device(cdi.KindGPU, g), device(cdi.KindGPU, other)}
			for _, devices := range [][]string{both, {both[1], both[0]}, {both[0], device(cdi.KindLane, other)}} {
				refusal := b.refused(b.bundle(g, devices, "look"))
				if runtimeName == "crun" { // crun hides the output of hooks
					continue
				}
				for _, words := range []string{"would hide GPU ", "peerlane.dev/gpu=all", "peerlane.dev/gpu=mine",
					"peerlane.dev/lane=N"} {
					if !strings.Contains(refusal, words) {
						t.Errorf("%q: the refusal does not say %q: %s", devices, words, refusal)
					}
				}
			}
			for _, devices := range [][]string{{cdi.KindGPU + "=mine"}, {cdi.KindGPU + "=all"},
				{both[0], cdi.KindGPU + "=mine"}, {both[0], cdi.KindGPU + "=" + g.UUID}} {
				found, c := b.lookIn(b.bundle(g, devices, "look"))
				visible := found.variables("CUDA_VISIBLE_DEVICES")
				if len(visible) != 1 || !strings.Contains(visible[0], g.UUID) {
					t.Errorf("%q: CUDA_VISIBLE_DEVICES is %q", devices, visible)
				}
				c.end()
			}
			// In some engines the user's variables take precedence.
			for _, devices := range [][]string{both[:1], both} {
				built := b.bundle(g, devices, "look")
				built.Spec.Process.Env = slices.DeleteFunc(built.Spec.Process.Env,
					func(e string) bool { return strings.HasPrefix(e, "CUDA_VISIBLE_DEVICES=") })
				built.Spec.Process.Env = append(built.Spec.Process.Env, "CUDA_VISIBLE_DEVICES=0,1")
				if err := built.Write(); err != nil {
					t.Fatal(err)
				}
				_, c := b.lookIn(built)
				c.end()
			}
		})
	}
}

// A container created by an earlier release has --lane as the only argument of its hooks, even with
// gpu=.
func TestContainerOfEarlierReleaseStarts(t *testing.T) {
	beside(t)
	b := newBed(t, "runc", asItIs)
	b.leavesNothing()
	g := b.gpu(b.lanes[0])
	built := b.bundle(g, []string{device(cdi.KindGPU, g)}, "look")
	for _, h := range built.Spec.Hooks.CreateRuntime {
		for i := range h.Args {
			h.Args[i] = strings.Replace(h.Args[i], "--gpu", "--lane", 1)
		}
	}
	if err := built.Write(); err != nil {
		t.Fatal(err)
	}
	if found, _ := b.lookIn(built); !found.Relay {
		t.Error("it has no relay")
	}
}

// Containers that register memory have no limit of locked memory. Processes started by `exec` keep
// the runtime's limit.
func TestLockedMemoryIsUnlimitedForInit(t *testing.T) { // not parallel: lowers the limit of this process
	const low = 64 << 10
	var own unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_MEMLOCK, &own); err != nil {
		t.Fatal(err)
	}
	lowered := own
	lowered.Cur = low
	if own.Max <= low {
		t.Fatalf("a process of this machine may lock %d bytes at most, and this needs more than %d", own.Max, low)
	}
	if err := unix.Setrlimit(unix.RLIMIT_MEMLOCK, &lowered); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Setrlimit(unix.RLIMIT_MEMLOCK, &own); err != nil {
			t.Error(err)
		}
	})
	lifted := "unlimited"
	if !mayRaiseLimits(t) && own.Max != unix.RLIM_INFINITY {
		lifted = strconv.FormatUint(own.Max, 10)
	}
	lowText, lowest := strconv.Itoa(low), strconv.Itoa(low/2)
	for _, runtimeName := range runtimes {
		t.Run(runtimeName, func(t *testing.T) {
			b := newBed(t, runtimeName, asItIs)
			b.leavesNothing()
			g := b.gpu(b.lanes[0])
			nic := b.nic(b.lanes[0].NICs[0])
			// runc's exec of a plain command uses the configured limits; crun's exec does not.
			configuredExec := map[string]string{"runc": lowest, "crun": lowText}[runtimeName]
			for _, test := range []struct {
				name       string
				device     string
				configured uint64
				init, exec string
			}{
				{"lane", device(cdi.KindLane, g), 0, lowText, lowText},
				{"gpu", device(cdi.KindGPU, g), 0, lifted, lowText},
				{"nic", cdi.KindNIC + "=" + nic.Name, 0, lifted, lowText},
				{"nic with a limit of its own", cdi.KindNIC + "=" + nic.Name, low / 2, lowest, configuredExec},
			} {
				t.Run(test.name, func(t *testing.T) {
					built := b.bundle(g, []string{test.device}, "look")
					if test.configured > 0 {
						built.Spec.Process.Rlimits = []specs.POSIXRlimit{
							{Type: "RLIMIT_MEMLOCK", Soft: test.configured, Hard: test.configured}}
						if err := built.Write(); err != nil {
							t.Fatal(err)
						}
					}
					found, c := b.lookIn(built)
					defer c.end()
					if found.Memlock != test.init {
						t.Errorf("the container's init may lock %s bytes, want %s", found.Memlock, test.init)
					}
					if found := c.exec("look")[0].Look; found.Memlock != test.exec {
						t.Errorf("limit of locked memory in exec: %s bytes, want %s", found.Memlock, test.exec)
					}
				})
			}
		})
	}
}

// mayRaiseLimits reports whether root of this machine may raise limits.
func mayRaiseLimits(t *testing.T) bool {
	t.Helper()
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&header, &data[0]); err != nil {
		t.Fatal(err)
	}
	return data[0].Effective&(1<<unix.CAP_SYS_RESOURCE) != 0
}
