package reader

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/peerlane/peerlane/internal/testutil"
	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/internal/topotest"
)

// soon fails the test if work does not return within a minute.
func soon(t *testing.T, what string, work func() error) error {
	t.Helper()
	done := make(chan error, 1)
	go func() { done <- work() }()
	select {
	case err := <-done:
		return err
	case <-testutil.After(time.Minute):
		t.Fatalf("%s: it waits", what)
		return nil
	}
}

// bothRead reads and captures a tree, and returns the errors.
func bothRead(t *testing.T, what string, o topo.Options) (read, captured error) {
	t.Helper()
	read = soon(t, what, func() error { _, err := Sysfs(o); return err })
	captured = soon(t, what, func() error { return Capture(o, io.Discard) })
	return read, captured
}

func TestSysfsIrregularFileFailsAtOnce(t *testing.T) {
	const function = "devices/pci0000:10/0000:10:01.0/0000:11:00.0"
	pipe := func(at string) error { return syscall.Mkfifo(at, 0o644) }
	zero := func(at string) error { return os.Symlink("/dev/zero", at) }
	loop := func(at string) error { return os.Symlink(filepath.Base(at), at) }
	huge := func(at string) error {
		if err := os.WriteFile(at, nil, 0o644); err != nil {
			return err
		}
		return os.Truncate(at, 1<<40)
	}
	long := &countError{items: "bytes", max: maxFile, countless: true}
	for name, c := range map[string]struct {
		at    string
		spoil func(at string) error
		want  error
	}{
		"a pipe for an attribute":        {"devices/pci0000:10/0000:10:01.0/numa_node", pipe, errNotRegular},
		"a pipe for a port's state":      {function + "/infiniband/mlx5_0/ports/1/state", pipe, errNotRegular},
		"a pipe for a configuration":     {function + "/config", pipe, errNotRegular},
		"a pipe for an interface's name": {function + "/infiniband/mlx5_0/ports/1/" + firstGID, pipe, errNotRegular},
		"a pipe for the processors":      {"../proc/cpuinfo", pipe, errNotRegular},
		"a pipe for a directory":         {"class/infiniband", pipe, syscall.ENOTDIR},
		"a device for an attribute":      {function + "/vendor", zero, errNotRegular},
		"a device for a configuration":   {function + "/config", zero, errNotRegular},
		"a link to itself":               {function + "/class", loop, syscall.ELOOP},
		"a link to itself for a device":  {"bus/pci/devices/0000:11:00.0", loop, syscall.ELOOP},
		"a link to itself for a NIC":     {"class/infiniband/mlx5_0", loop, syscall.ELOOP},
		"a link to itself for a list":    {"bus/pci/devices", loop, syscall.ELOOP},
		"an attribute without end":       {function + "/class", huge, long},
		"a driver's answer without end": {"../proc/driver/nvidia/gpus/0001:00:00.0/information", huge,
			long},
		"a directory for a configuration": {function + "/config", func(at string) error { return os.Mkdir(at, 0o755) },
			syscall.EISDIR},
	} {
		o := topotest.Tree(t, variedHost())
		at := filepath.Join(o.Sysfs, c.at)
		if err := errors.Join(os.MkdirAll(filepath.Dir(at), 0o755), os.RemoveAll(at), c.spoil(at)); err != nil {
			t.Fatal(err)
		}
		read, captured := bothRead(t, name, o)
		for by, err := range map[string]error{"reading": read, "capturing": captured} {
			if by == "capturing" && strings.Contains(c.at, "bus/pci/devices/") {
				continue // Capture does not follow the link
			}
			path, ok := errors.AsType[*fs.PathError](err)
			if !testutil.HasError(err, c.want) || !ok || !strings.Contains(path.Path, filepath.Base(c.at)) {
				t.Errorf("%s, %s: %v; want %v and the file", name, by, err, c.want)
			}
		}
	}
}

func TestSysfsEndlessCPUInfoReadsFirstProcessor(t *testing.T) {
	o := topotest.Tree(t, variedHost())
	if err := os.Truncate(filepath.Join(o.Proc, "cpuinfo"), 1<<40); err != nil {
		t.Fatal(err)
	}
	h, err := Sysfs(o)
	if err != nil || h.CPUs[0].Socket != 40 { // Emerald Rapids
		t.Errorf("%+v, %v", h, err)
	}
}

// Files of procfs have size 0, and a read in the middle can be short.
func TestMachineKernelFilesAreReadWhole(t *testing.T) {
	for _, name := range []string{"/proc/crypto", "/proc/modules", "/proc/devices", "/sys/kernel/notes",
		"/proc/self/environ"} {
		want, err := os.ReadFile(name)
		if err != nil {
			continue // not every kernel has or shows the file
		}
		got, err := machine{}.ReadFile(name)
		if err != nil || string(got) != string(want) {
			t.Errorf("%s: %d bytes of %d, %v", name, len(got), len(want), err)
		}
		f, err := machine{}.Open(name)
		if err != nil {
			t.Fatal(err)
		}
		part := make([]byte, len(want)+1)
		if n, err := f.ReadAt(part, 0); err != io.EOF || string(part[:n]) != string(want) {
			t.Errorf("%s, in parts: %d bytes of %d, %v", name, n, len(want), err)
		}
		if err := f.Close(); err != nil {
			t.Error(err)
		}
	}
}

func TestReadDirAboveLimitFails(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"c", "a", "b"} {
		if err := os.Mkdir(filepath.Join(dir, name), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	entries, err := readDir(dir, 3)
	if err != nil || len(entries) != 3 || entries[0].Name() != "a" || entries[2].Name() != "c" {
		t.Errorf("%v, %v", entries, err)
	}
	_, err = readDir(dir, 2)
	if path, ok := errors.AsType[*fs.PathError](err); !ok || path.Path != dir ||
		!testutil.HasError(err, &countError{items: "entries", max: 2, countless: true}) {
		t.Errorf("three entries where two may be: %v", err)
	}
}

// answering is a machine with replaced answers. If a function returns nil and no error, answering
// uses the answer of machine.
type answering struct {
	machine
	file func(path string) ([]byte, error)
	link func(path string) (string, error)
	dir  func(path string) ([]fs.DirEntry, error)
}

func (a answering) ReadFile(path string) ([]byte, error) {
	if text, err := a.file(path); text != nil || err != nil {
		return text, err
	}
	return a.machine.ReadFile(path)
}

func (a answering) Open(path string) (openFile, error) {
	if _, err := a.file(path); err != nil {
		return nil, err
	}
	return a.machine.Open(path)
}

func (a answering) ReadLink(path string) (string, error) {
	if a.link != nil {
		if target, err := a.link(path); target != "" || err != nil {
			return target, err
		}
	}
	return a.machine.ReadLink(path)
}

func (a answering) ReadDir(path string) ([]fs.DirEntry, error) {
	if a.dir != nil {
		if entries, err := a.dir(path); entries != nil || err != nil {
			return entries, err
		}
	}
	return a.machine.ReadDir(path)
}

func failingAt(part string, err error) answering {
	return answering{file: func(path string) ([]byte, error) {
		if strings.Contains(path, part) {
			return nil, &fs.PathError{Op: "read", Path: path, Err: err}
		}
		return nil, nil
	}}
}

func TestSysfsFailingDeviceStillCounts(t *testing.T) {
	o := topotest.Tree(t, variedHost())
	whole, err := Sysfs(o)
	if err != nil {
		t.Fatal(err)
	}
	for part, err := range map[string]error{
		"current_link_speed": syscall.EINVAL, "max_link_width": syscall.EIO, "ports/1/state": syscall.EINVAL,
		"ports/1/rate": syscall.ENXIO,
		"node_guid":    syscall.ETIMEDOUT, "0001:00:00.0/config": syscall.EIO,
	} {
		h, got := readHost(o, failingAt(part, err))
		if got != nil || len(h.GPUs) != len(whole.GPUs) || len(h.NICs) != len(whole.NICs) {
			t.Errorf("%s answers %v: %+v, %v", part, err, h, got)
			continue
		}
		notes := notesWith(h, err.Error())
		if len(notes) == 0 || !strings.Contains(notes[0], part) {
			t.Errorf("%s answers %v, and no note says so: %q", part, err, h.Notes)
		}
	}
	// Missing permission is not a fault of the device.
	var failed *fs.PathError
	if _, err := readHost(o, failingAt("numa_node", fs.ErrPermission)); !errors.Is(err, fs.ErrPermission) ||
		!errors.As(err, &failed) || filepath.Base(failed.Path) != "numa_node" {
		t.Errorf("an attribute that may not be read: %v", err)
	}
	h, err := readHost(o, failingAt("/config", fs.ErrPermission))
	if err != nil || len(h.PCIePorts) == 0 || !h.PCIePorts[0].Inferred {
		t.Errorf("configuration space that may not be read: %+v, %v", h, err)
	}
}

func TestSysfsVanishingDeviceIsSkipped(t *testing.T) {
	o := topotest.Tree(t, variedHost())
	whole, err := Sysfs(o)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		what       string
		from       answering
		gpus, nics int
		note       string
	}{
		{"attributes of a GPU", failingAt("0001:00:00.0/", syscall.ENODEV), 0, 0, ""},
		{"a GPU after its class", answering{file: func(string) ([]byte, error) { return nil, nil },
			link: func(path string) (string, error) {
				if strings.HasSuffix(path, "devices/0001:00:00.0") {
					return "", &fs.PathError{Op: "readlink", Path: path, Err: syscall.ENOENT}
				}
				return "", nil
			}}, 1, 0, "GPU 0001:00:00.0 vanished"},
		{"a NIC's function", answering{file: func(string) ([]byte, error) { return nil, nil },
			link: func(path string) (string, error) {
				if strings.HasSuffix(path, "devices/0000:11:00.0") {
					return "", &fs.PathError{Op: "readlink", Path: path, Err: syscall.ENOENT}
				}
				return "", nil
			}}, 0, 3, "RDMA device mlx5_0 vanished"},
		{"a port's attributes", failingAt("ports/1/", syscall.ENODEV), 0, 0, ""},
	} {
		h, err := readHost(o, c.from)
		if err != nil {
			t.Errorf("%s: %v", c.what, err)
			continue
		}
		gpus := len(whole.GPUs) - len(h.GPUs)
		if c.what == "attributes of a GPU" {
			gpus-- // a function without class is not a GPU
		}
		if gpus != c.gpus || len(whole.NICs)-len(h.NICs) != c.nics || c.note != "" && len(notesWith(h, c.note)) != 1 {
			t.Errorf("%s: %d GPUs and %d NICs fewer, notes %q", c.what, gpus, len(whole.NICs)-len(h.NICs), h.Notes)
		}
	}
}

func TestSysfsTooManyDevicesFail(t *testing.T) {
	entries := func(count int, name func(i int) string) (all []fs.DirEntry) {
		for i := range count {
			all = append(all, fs.FileInfoToDirEntry(heldInfo{name: name(i)}))
		}
		return all
	}
	o := topotest.Tree(t, nil)
	address := func(i int) string { return fmt.Sprintf("%04x:%02x:%02x.%x", i>>16, i>>8&0xff, i>>3&0x1f, i&7) }
	for want, c := range map[countError]struct {
		dir     string
		entries []fs.DirEntry
	}{
		{items: "GPUs", count: 4097, max: topo.MaxDevices}: {"bus/pci/devices", entries(topo.MaxDevices+1, address)},
		{items: "RDMA devices", count: 4097, max: topo.MaxDevices}: {"class/infiniband",
			entries(topo.MaxDevices+1, func(i int) string { return fmt.Sprint("mlx5_", i) })},
		{items: "NUMA nodes", max: 1024, countless: true}: {"devices/system/node",
			entries(maxNodes+1, func(i int) string { return fmt.Sprint("node", i) })},
	} {
		_, err := readHost(o, answering{
			file: func(path string) ([]byte, error) {
				switch filepath.Base(path) {
				case "class":
					return []byte("0x030200\n"), nil
				case "vendor":
					return []byte("0x10de\n"), nil
				}
				return nil, nil
			},
			link: func(path string) (string, error) {
				if strings.HasSuffix(filepath.Dir(path), "bus/pci/devices") {
					return "../../../devices/pci0000:00/" + filepath.Base(path), nil
				}
				return "", nil
			},
			dir: func(path string) ([]fs.DirEntry, error) {
				if strings.HasSuffix(path, c.dir) {
					return c.entries, nil
				}
				return nil, nil
			},
		})
		if !testutil.HasError(err, &want) {
			t.Errorf("%v; want %v", err, &want)
		}
	}
}

func TestSysfsNUMANumberAboveLimitFails(t *testing.T) {
	for want, files := range map[int]map[string]string{
		65536: {"sys/devices/system/node/node65536/cpulist": "0"},
		4611686018427387904: {
			"sys/devices/system/node/node0/cpulist": "0", "sys/devices/system/node/node1/cpulist": "1",
		},
	} {
		topotest.Device(files, "pci0000:00/0000:01:00.0", topotest.GPUClass, topotest.GPUVendor,
			"numa_node=4611686018427387904")
		h, err := Sysfs(topotest.Tree(t, files))
		if !testutil.HasError(err, &topo.RangeError{Number: "NUMA node", Value: want, Max: 65535}) {
			t.Errorf("%+v, %v; want NUMA node %d", h, err, want)
		}
	}
}
