package doctor

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/peerlane/peerlane/cdi"
	"github.com/peerlane/peerlane/config"
	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/hook/control"
	"github.com/peerlane/peerlane/hook/generation"
	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/nvml"
	"github.com/peerlane/peerlane/topo/planner"
	"github.com/peerlane/peerlane/topo/reader"
)

// NVML is the part of NVIDIA's management library that checks use; nvml.Library implements it.
type NVML interface {
	topo.NVML
	Health() (nvml.Health, error)
}

// Host is the examined host. Checks read only through Host, so that tests can substitute a fake
// host.
type Host struct {
	// Sysfs and Proc are the roots of sysfs and procfs. Root is the root of /dev, /etc, /usr and
	// /boot.
	Sysfs, Proc, Root string
	Layout            paths.Layout
	// SpecDirs are the directories that engines read, in order of priority.
	SpecDirs []string
	// NVML is nil unless the host is this machine, which the library describes.
	NVML NVML
	// Software lets plans use software RDMA.
	Software bool
	// Relays lists the generations of a layout; usually generation.List.
	Relays func(paths.Layout) ([]generation.Info, error)
	// Ask asks relays for a report, with a time limit; usually control.Ask.
	Ask func(paths.Layout, []generation.Info, time.Duration) control.Reports
	// Staged returns the staging memory of each GPU by PCI address; usually staging.StagingByGPU.
	Staged func(paths.Layout) (map[string]uint64, error)
	// Pairs are the results of a self-test of this command, which are not recorded.
	Pairs []launch.Pair
	// Meetings are the connections with other hosts; nil without --connect.
	Meetings *Meetings
	// Interval is the time between two readings of counters.
	Interval time.Duration
	// wait replaces the pause in tests; nil to wait for the time.
	wait func(context.Context, time.Duration)
	// ask replaces askVersion in tests; nil for askVersion.
	ask func(ctx context.Context, path string) (string, error)

	once   sync.Once
	config func() (config.Config, error)
	topo   func() (*topo.Host, error)
	plan   func() (*planner.Plan, error)
	health func() (nvml.Health, error)
	drift  func() (drift, error)
	relays func() ([]generation.Info, error)
}

// drift holds the differences between the installed specifications and the host, and the hook that
// the specifications name.
type drift struct {
	list  []cdi.Drift
	files int
	hook  string
}

// prepare creates functions for the facts that several checks share. The first check that calls a
// function reads the fact, and a read that hangs blocks only the checks of that fact.
func (h *Host) prepare() {
	h.once.Do(func() {
		h.config = sync.OnceValues(func() (config.Config, error) { return config.Load(h.Layout.ConfigFile()) })
		h.topo = sync.OnceValues(func() (*topo.Host, error) {
			o := topo.Options{Sysfs: h.Sysfs, Proc: h.Proc}
			if h.NVML != nil {
				o.NVML = h.NVML
			}
			return reader.Sysfs(o)
		})
		h.plan = sync.OnceValues(func() (*planner.Plan, error) {
			t, err := h.topo()
			if err != nil {
				return nil, err
			}
			c, err := h.config()
			if err != nil {
				return nil, err
			}
			p := c.PlannerConfig()
			p.Software = p.Software || h.Software
			return planner.Make(t, p)
		})
		h.health = sync.OnceValues(func() (nvml.Health, error) {
			if h.NVML == nil {
				return nvml.Health{}, errors.New("NVML tells of this machine, and omit it with the files of another host")
			}
			return h.NVML.Health()
		})
		h.drift = sync.OnceValues(h.findDrift)
		h.relays = sync.OnceValues(func() ([]generation.Info, error) { return h.Relays(h.Layout) })
	})
}

// readPlan returns the plan of the host as it is now.
func (h *Host) readPlan() (*planner.Plan, error) { h.prepare(); return h.plan() }

func (h *Host) topology() (*topo.Host, error)           { h.prepare(); return h.topo() }
func (h *Host) configuration() (config.Config, error)   { h.prepare(); return h.config() }
func (h *Host) nvml() (nvml.Health, error)              { h.prepare(); return h.health() }
func (h *Host) generations() ([]generation.Info, error) { h.prepare(); return h.relays() }

func (h *Host) sys(elem ...string) string {
	return filepath.Join(append([]string{h.Sysfs}, elem...)...)
}
func (h *Host) proc(elem ...string) string {
	return filepath.Join(append([]string{h.Proc}, elem...)...)
}
func (h *Host) path(elem ...string) string {
	return filepath.Join(append([]string{h.Root}, elem...)...)
}

// maxText is above the size of any file that a check reads as a whole.
const maxText = 4 << 20

// read returns the content of a file.
func read(path string) (string, error) {
	f, err := openFile(path)
	if err != nil {
		return "", err
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, maxText+1))
	if err == nil && len(text) > maxText {
		err = &fs.PathError{Op: "read", Path: path, Err: fmt.Errorf("larger than %d bytes", maxText)}
	}
	return strings.TrimSpace(string(text)), err
}

// readTail returns the last maxLog bytes of a file of any size.
func readTail(path string) (string, error) {
	f, err := openFile(path)
	if err != nil {
		return "", err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return "", err
	}
	text, err := io.ReadAll(io.NewSectionReader(f, max(0, info.Size()-maxLog), maxLog))
	return string(text), err
}

// openFile opens regular files only, so that no pipe or device can block a check.
func openFile(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK|syscall.O_NOCTTY, 0)
	if err != nil {
		return nil, err
	}
	info, err := f.Stat()
	if err == nil && !info.Mode().IsRegular() {
		err = &fs.PathError{Op: "read", Path: path, Err: errors.New("not a regular file")}
	}
	if err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

func absent(err error) bool { return errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ENODEV) }

// denied describes an access that this user is denied.
func denied(err error) string {
	if errors.Is(err, fs.ErrPermission) {
		return fmt.Sprintf("%v; run peerlane doctor as root", err)
	}
	return err.Error()
}

// oneLine returns the text of a joined error as part of a sentence.
func oneLine(err error) string { return strings.ReplaceAll(err.Error(), "\n", ", and ") }

// gpuName returns the GPU's name for messages.
func gpuName(g topo.GPU) string { return fmt.Sprintf("GPU %d (%s)", g.Index, g.BusID) }

// lanesOfGPU returns the lanes that a GPU has or serves, by index.
func (h *Host) lanesOfGPU(busID string) []int {
	return h.lanesWith(func(l planner.Lane) bool { return l.GPU == busID || slices.Contains(l.Servers, busID) })
}

// lanesOfNIC returns the lanes that a NIC carries.
func (h *Host) lanesOfNIC(name string) []int {
	return h.lanesWith(func(l planner.Lane) bool { return slices.Contains(l.NICs, name) })
}

// lanesWith returns the lanes that match, or every lane without a plan.
func (h *Host) lanesWith(touched func(planner.Lane) bool) []int {
	p, err := h.readPlan()
	if err != nil {
		return nil
	}
	list := []int{}
	for _, l := range p.Lanes {
		if !touched(l) {
			continue
		}
		if gpu, err := p.GPU(l.GPU); err == nil {
			list = append(list, gpu.Index)
		}
	}
	return list
}

// aboutGPUs calls look for each NVIDIA GPU.
func (h *Host) aboutGPUs(look func(topo.GPU) []Finding) []Finding {
	t, err := h.topology()
	if err != nil {
		return []Finding{unknown("host", "%s", denied(err))}
	}
	var list []Finding
	count := 0
	for _, g := range t.GPUs {
		if g.Vendor == "" {
			count++
			list = append(list, look(g)...)
		}
	}
	if count == 0 {
		return notApplicable("there is no NVIDIA GPU")
	}
	return list
}

// aboutNICs calls look for each RDMA device.
func (h *Host) aboutNICs(look func(topo.NIC) []Finding) []Finding {
	nics, list := h.nics()
	for _, n := range nics {
		list = append(list, look(n)...)
	}
	return list
}

// nics returns the RDMA devices; findings in their place if the host has none, or has no topology.
func (h *Host) nics() ([]topo.NIC, []Finding) {
	t, err := h.topology()
	switch {
	case err != nil:
		return nil, []Finding{unknown("host", "%s", denied(err))}
	case len(t.NICs) == 0:
		return nil, notApplicable("there is no RDMA device")
	}
	return t.NICs, nil
}

// programs are the directories of a host's programs.
var programs = []string{"usr/local/sbin", "usr/local/bin", "usr/sbin", "usr/bin", "sbin", "bin"}

// program returns the path of a program, or "" if it is absent.
func (h *Host) program(name string) string {
	for _, dir := range programs {
		if info, err := os.Stat(h.path(dir, name)); err == nil && info.Mode().IsRegular() && info.Mode()&0o111 != 0 {
			return h.path(dir, name)
		}
	}
	return ""
}

var versionForm = regexp.MustCompile(`\bv?(\d{1,6})\.(\d{1,6})(?:\.(\d{1,6}))?`)

// errForeign is the error of a program below the root of another system.
var errForeign = errors.New("not run, because it is outside the running system (root other than /)")

// version runs a program with --version. With a root other than / it runs nothing: checks usually
// run as root, and the directory may be an untrusted image or backup.
func (h *Host) version(ctx context.Context, path string) (number [3]int, err error) {
	ask := h.ask
	if ask == nil {
		if h.Root != "/" {
			return number, fmt.Errorf("%s: %w", path, errForeign)
		}
		ask = askVersion
	}
	output, err := ask(ctx, path)
	if err != nil {
		return number, fmt.Errorf("%s --version: %w", path, err)
	}
	m := versionForm.FindStringSubmatch(output)
	if m == nil {
		return number, fmt.Errorf("%s --version says %.80q, which has no version", path, strings.TrimSpace(output))
	}
	for i := range number {
		fmt.Sscan(m[i+1], &number[i]) // a failure leaves 0
	}
	return number, nil
}

// askVersion returns the output of `path --version`.
func askVersion(ctx context.Context, path string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	cmd := exec.CommandContext(ctx, path, "--version")
	cmd.Env = []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/nonexistent"}
	cmd.WaitDelay = time.Second
	output, err := cmd.Output()
	return string(output), err
}

// below reports whether a version is lower than another.
func below(number [3]int, than ...int) bool { return slices.Compare(number[:len(than)], than) < 0 }

func dotted(number [3]int) string { return fmt.Sprintf("%d.%d.%d", number[0], number[1], number[2]) }
