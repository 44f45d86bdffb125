//go:build vm

package small_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
	"unsafe"

	"github.com/google/go-cmp/cmp"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/cmd/peerlane/bundle"
	"github.com/peerlane/peerlane/cmd/peerlane/testbed"
	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/integration/vm/inside"
	"github.com/peerlane/peerlane/internal/testutil"
)

// The test binary is also the program of the containers.
func TestMain(m *testing.M) {
	if len(os.Args) > 2 && os.Args[1] == "register" {
		os.Exit(registerMain(os.Args[2:]))
	}
	os.Exit(m.Run())
}

// registered is the output of a program in a container.
type registered struct {
	Nodes       []string          // in /dev/infiniband
	Environment []string          // variables of Peerlane
	Memlock     string            // soft limit in /proc/self/limits
	Errors      map[string]string // by size; empty after success
}

// registerMain registers memory of the sizes in the arguments with the NIC, in sequence, and waits
// for the end of input.
func registerMain(sizes []string) int {
	found := registered{Errors: map[string]string{}}
	err := found.look()
	for _, size := range sizes {
		n, bad := strconv.Atoi(size)
		if bad != nil {
			err = bad
			break
		}
		found.Errors[size] = ""
		if e := register(n); e != nil {
			found.Errors[size] = e.Error()
		}
	}
	if err == nil {
		err = json.NewEncoder(os.Stdout).Encode(found)
	}
	if err == nil {
		_, err = io.Copy(io.Discard, os.Stdin)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

func (r *registered) look() error {
	nodes, err := os.ReadDir("/dev/infiniband")
	if err != nil {
		return err
	}
	for _, n := range nodes {
		r.Nodes = append(r.Nodes, n.Name())
	}
	for _, e := range os.Environ() {
		if strings.HasPrefix(e, "PEERLANE_") {
			r.Environment = append(r.Environment, e)
		}
	}
	limits, err := os.ReadFile("/proc/self/limits")
	for line := range strings.Lines(string(limits)) {
		if rest, ok := strings.CutPrefix(line, "Max locked memory"); ok {
			r.Memlock = strings.Fields(rest)[0]
		}
	}
	return err
}

// Commands of rdma/ib_user_verbs.h: a header, then the command, whose first member is the address
// of the answer.
const (
	getContext        = 0
	allocPD           = 3
	regMR             = 9
	accessLocalWrite  = 1
	accessRemoteWrite = 2
)

// verb writes a command and returns the answer, both in 32-bit words. It needs no library, so any
// root file system works.
func verb(device *os.File, command uint32, answerWords int, words ...uint32) ([]uint32, error) {
	answer := make([]uint32, answerWords)
	at := uint64(uintptr(unsafe.Pointer(&answer[0])))
	all := append([]uint32{command, 0, uint32(at), uint32(at >> 32)}, words...)
	all[1] = uint32(len(all)) | uint32(answerWords)<<16
	text := unsafe.Slice((*byte)(unsafe.Pointer(&all[0])), 4*len(all))
	_, err := unix.Write(int(device.Fd()), text)
	return answer, err
}

// register registers memory as ibv_reg_mr does.
func register(bytes int) error {
	nodes, err := filepath.Glob("/dev/infiniband/uverbs*")
	if err != nil || len(nodes) != 1 {
		return fmt.Errorf("the nodes are %q, %v", nodes, err)
	}
	device, err := os.OpenFile(nodes[0], os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer device.Close()
	if _, err := verb(device, getContext, 2); err != nil {
		return fmt.Errorf("a context: %w", err)
	}
	pd, err := verb(device, allocPD, 1)
	if err != nil {
		return fmt.Errorf("a protection domain: %w", err)
	}
	memory, err := unix.Mmap(-1, 0, bytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return err
	}
	start := uint64(uintptr(unsafe.Pointer(&memory[0])))
	mr, err := verb(device, regMR, 3,
		uint32(start), uint32(start>>32), uint32(bytes), 0, uint32(start), uint32(
			start>>32), pd[0], accessLocalWrite|accessRemoteWrite)
	if err != nil {
		return fmt.Errorf("register: %w", err)
	}
	if mr[1] == 0 && mr[2] == 0 {
		return fmt.Errorf("registration returned no keys: %v", mr)
	}
	return unix.Munmap(memory)
}

// With nic= the init of a container registers more memory than the memlock limit of the test. A
// process started by exec has that limit, or the limit of the container's configuration.
func TestContainerWithNICRegistersMemory(t *testing.T) {
	const (
		few, many = 1 << 20, 32 << 20
		ownLimit  = 8 << 20
	)
	twoNICs(t, inside.RoCE)
	inside.Command(t, "modprobe", "ib_umad") // no container gets these nodes
	limit := unix.Rlimit{Cur: ownLimit, Max: ownLimit}
	var own unix.Rlimit
	if err := unix.Prlimit(0, unix.RLIMIT_MEMLOCK, &limit, &own); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Setrlimit(unix.RLIMIT_MEMLOCK, &own); err != nil {
			t.Error(err)
		}
	})
	root := t.TempDir()
	testbed.UnmountAnchor(t, paths.New(root))
	specifications := filepath.Join(root, "cdi")
	inside.Command(t, filepath.Join(inside.Binaries, "peerlane"), "cdi", "generate", "--root", root, "--spec-dir",
		specifications)
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	sizes := []string{strconv.Itoa(few), strconv.Itoa(many)}
	const tooMuch = "register: cannot allocate memory"
	for _, name := range []string{"runc", "crun"} {
		for _, test := range []struct {
			name       string
			device     string
			configured uint64
			// result of registering many bytes in the container's init and in exec; the
			// registration of few bytes always succeeds
			init, exec string
		}{
			{"by name", "peerlane.dev/nic=mlx5_0", 0, "", tooMuch},
			{"by address", "peerlane.dev/nic=0000:1a:00.0", 0, "", tooMuch},
			{"with a limit of its own", "peerlane.dev/nic=mlx5_0", ownLimit / 2, tooMuch, tooMuch},
			// crun's exec of a plain command does not use the configuration.
			{"without a limit of its own", "peerlane.dev/nic=mlx5_0", unix.RLIM_INFINITY, "",
				map[string]string{"runc": "", "crun": tooMuch}[name]},
		} {
			t.Run(name+"/"+test.name, func(t *testing.T) {
				dir := t.TempDir()
				b := bundle.New(dir, append([]string{"/usr/bin/test", "register"}, sizes...)...)
				if err := bundle.RootFS(filepath.Join(dir, "rootfs"),
					[]bundle.File{{Host: self, Container: "/usr/bin/test"}}); err != nil {
					t.Fatal(err)
				}
				if test.configured > 0 {
					b.Spec.Process.Rlimits = []specs.POSIXRlimit{{Type: "RLIMIT_MEMLOCK", Soft: test.configured,
						Hard: test.configured}}
				}
				if err := b.Inject(specifications, test.device); err != nil {
					t.Fatal(err)
				}
				if err := b.Write(); err != nil {
					t.Fatal(err)
				}
				r, err := bundle.FindRuntime(name, filepath.Join(root, "runtime"))
				if err != nil {
					t.Fatal(err)
				}
				ctx, cancel := testutil.WithLimit(t.Context(), 5*time.Minute)
				defer cancel()
				id := "registers-" + strconv.Itoa(os.Getpid())
				c := r.Run(ctx, b, id)
				stdin, err := c.StdinPipe()
				if err != nil {
					t.Fatal(err)
				}
				stdout, err := c.StdoutPipe()
				if err != nil {
					t.Fatal(err)
				}
				var stderr bytes.Buffer
				c.Stderr = &stderr
				if err := c.Start(); err != nil {
					t.Fatal(err)
				}
				var init registered
				if err := json.NewDecoder(stdout).Decode(&init); err != nil {
					t.Errorf("the container says nothing: %v: %s", err, stderr.String())
				}
				var exec registered
				text, err := command(r.Command(ctx, append([]string{"exec", id, "/usr/bin/test", "register"}, sizes...)...))
				if err == nil {
					err = json.Unmarshal(text, &exec)
				}
				if err != nil {
					t.Errorf("exec: %v", err)
				}
				if err := stdin.Close(); err != nil {
					t.Error(err)
				}
				if err := c.Wait(); err != nil {
					t.Errorf("the container: %v: %s", err, stderr.String())
				}
				t.Logf("init may lock %s, exec %s", init.Memlock, exec.Memlock)
				for who, got := range map[string]registered{"init": init, "exec": exec} {
					many := map[string]string{"init": test.init, "exec": test.exec}[who]
					if diff := cmp.Diff(map[string]string{sizes[0]: "", sizes[1]: many}, got.Errors); diff != "" {
						t.Errorf("registering from %s, with a limit of %s (-want +got):\n%s", who, got.Memlock, diff)
					}
					slices.Sort(got.Nodes)
					// The software driver presents itself as NVIDIA's open module.
					if !slices.Equal(got.Nodes, []string{"rdma_cm", "uverbs0"}) ||
						!slices.Equal(got.Environment, []string{"PEERLANE_REGISTRATION=dmabuf"}) {
						t.Errorf("%s finds the nodes %q and the variables %q", who, got.Nodes, got.Environment)
					}
				}
				// A NIC alone has no relay.
				if left, err := filepath.Glob(filepath.Join(root, "var/lib/peerlane/generations/*")); err != nil || len(left) > 0 {
					t.Errorf("generations %q, %v", left, err)
				}
			})
		}
	}
}

func command(c *exec.Cmd) ([]byte, error) {
	var stderr bytes.Buffer
	c.Stderr = &stderr
	out, err := c.Output()
	if err != nil {
		return nil, fmt.Errorf("%w: %s", err, stderr.String())
	}
	return out, nil
}
