// Package softdevice provides a libibverbs.so.1 that needs no RDMA device, for tests: it records
// calls, fails scripted calls, and moves bytes between queue pairs, within a process and between
// processes of a host.
//
// It is a shared library, written in C, that package verbs opens in place of rdma-core's, so that
// everything above runs unchanged. The device checks requests as a NIC and the kernel do: keys,
// bounds and rights on both sides, the existence of registered memory, states and attributes, room
// in queues. The device refuses early destruction with EBUSY, and records it. It stands in for
// librdmacm.so.1, too: devices of iWARP are connected by that alone, at their addresses.
//
// A software device's host is a directory ([Host]) with the library and its files: a process is on
// the host whose library it opens, by PEERLANE_VERBS_LIBRARY or [verbs.OpenLibrary], and can be on
// several.
//
// The device registers DMA-BUF descriptors of the CUDA simulator, and through a substitute for
// nvidia-peermem the simulator's pointers, and moves bytes from and to that memory. When a
// registration ends it records whether the GPU's memory is still there, by the address that was
// given as the iova, and how many pairs of the domain are.
//
// If a host has the process of package engine, the library registers GPU memory with that process, on
// simulated and real GPUs alike, and the GPUs copy the bytes. Work requests for that memory go to the
// engine, and completions come from the engine, by rings in shared memory (libibverbs/rings.c).
//
// Limits of the model: segments beyond one, shared receive queues, a NIC that answers late. A
// request whose pair is not there any more ends with RetryExceeded at once; one whose port, on
// either side, is down does so after the pair's timeout and retries.
package softdevice

import (
	"bufio"
	"cmp"
	"crypto/sha256"
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"github.com/peerlane/peerlane/relay/libpeerlane"
	"github.com/peerlane/peerlane/relay/verbs"
)

// libraryName is the file name of the library.
const libraryName = "libpeerlane-softdevice.so"

//go:embed libibverbs/*.c libibverbs/*.h
var source embed.FS

// flags are the flags of the library, for any C compiler with GCC's command line. The library needs
// glibc alone.
var flags = []string{
	"-std=gnu11", "-O2", "-g", "-Wall", "-Wextra", "-Wshadow", "-fPIC", "-fvisibility=hidden", "-pthread",
	"-fstack-protector-strong", "-U_FORTIFY_SOURCE", "-D_FORTIFY_SOURCE=2",
	"-shared", "-Wl,-z,defs,-z,relro,-z,now,-z,noexecstack",
}

// files are the library's source, by name.
var files = sync.OnceValue(func() map[string]string {
	all := map[string]string{"abi.h": verbs.Header}
	entries, _ := source.ReadDir("libibverbs") // of an embedded file system: cannot fail
	for _, e := range entries {
		text, _ := source.ReadFile("libibverbs/" + e.Name())
		all[e.Name()] = string(text)
	}
	return all
})

// fingerprint identifies the source, so that a library of a different source is not used. Flags
// count as source.
var fingerprint = sync.OnceValue(func() string {
	h := sha256.New()
	fmt.Fprintln(h, flags, files()) // maps are printed in order
	return fmt.Sprintf("%x", h.Sum(nil)[:16])
})

// library is the path of the library, built from the source in this program: beside the
// running executable, else in bin/ of the repository that the working directory is in,
// which is where machines without a compiler have it, else compiled, once, into the
// user's cache directory.
func library() (string, error) {
	exe, err := os.Executable()
	if err != nil {
		return "", err
	}
	cache, err := os.UserCacheDir()
	if err != nil {
		return "", err
	}
	cached := filepath.Join(cache, "peerlane", "softdevice-"+fingerprint(), libraryName)
	places := []string{filepath.Join(filepath.Dir(exe), libraryName), cached}
	for dir, err := os.Getwd(); err == nil && dir != "/"; dir = filepath.Dir(dir) {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
			places = append(places, filepath.Join(dir, "bin", libraryName))
			break
		}
	}
	for _, path := range places {
		if current(path) {
			return path, nil
		}
	}
	return cached, Build(cached)
}

// current says whether the library at path was built from this source, by the mark that
// it carries.
func current(path string) bool {
	content, err := os.ReadFile(path)
	return err == nil && strings.Contains(string(content), "peerlane-software-device:"+fingerprint())
}

// Build compiles the library to path. It replaces an existing file atomically, so that concurrent
// processes are safe.
func Build(path string) (err error) {
	compiler, err := libpeerlane.Compiler()
	if err != nil {
		return fmt.Errorf("the software device cannot be compiled: %w", err)
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	dir, err := os.MkdirTemp(filepath.Dir(path), ".softdevice-*")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	args := append(append([]string{}, compiler[1:]...), flags...)
	args = append(
		args,
		"-ffile-prefix-map="+dir+"=softdevice",
		`-DSOFTDEVICE_SOURCE="`+fingerprint()+`"`,
		"-o",
		libraryName,
	)
	texts := files()
	for _, name := range slices.Sorted(maps.Keys(texts)) { // the same order gives the same library
		if err := os.WriteFile(filepath.Join(dir, name), []byte(texts[name]), 0o644); err != nil {
			return err
		}
		if strings.HasSuffix(name, ".c") {
			args = append(args, name)
		}
	}
	// Before glibc 2.34 libdl is not in libc.
	c := exec.Command(compiler[0], append(args, "-ldl")...)
	c.Dir = dir
	if out, err := c.CombinedOutput(); err != nil {
		return fmt.Errorf("compiling the software device with %s: %w\n%s", compiler[0], err, out)
	}
	return os.Rename(filepath.Join(dir, libraryName), path)
}

// Device is an RDMA device of a host. The comment of a field states the meaning of zero.
type Device struct {
	Name       string
	GUID       uint64
	IWARP      bool // IB
	InfiniBand bool // Ethernet
	Down       bool // the port is active
	LID        uint16
	Prefix     uint64 // of the subnet of InfiniBand (fe80::)
	GRH        bool   // the port requires a GRH
	ECE        uint32 // options of Enhanced Connection Establishment; none
	DataDirect bool   // the device has a Data Direct function
	NoResize   bool   // ibv_resize_cq is supported
	Entries    int    // max_cqe (65536)
	Address    string // IPv4, of the GID table's entries 2 (RoCE v1) and 3 (RoCE v2); none
	Moved      bool   // the address's entries are 4 and 5
	NoDMABuf   bool   // ibv_reg_dmabuf_mr is supported
	Peermem    string // "no", "alloc" (not for VMM memory), "yes"; "no"
	// Holds keeps writes into a GPU's memory back until the NIC reads that memory, as a GPU may that
	// orders the writes of NICs only for the GPU itself.
	Holds bool
	// Fault is how a broken device treats GPUs' memory, one of Faults; empty for none.
	Fault string
	// Rate limits the sum of the data rates of all processes, bytes a second; 0 for no limit.
	Rate uint64
	// Seed has writes be in the memory in another order than that of the requests, within the
	// limits of the specification: writes of several queue pairs, and of a queue pair in regions
	// with relaxed ordering until a receive completes or a read is answered. 0 keeps the order.
	Seed uint64
}

// Faults are the values of Device.Fault. With FaultNoFlush a read flushes no earlier write to GPU
// memory, with FaultReorderedFlush a read passes the previous write; with FaultStaleRead the device
// sends the GPU memory of the previous read; with FaultLostTail some writes lack the last bytes,
// with FaultWrongGPU writes go to memory of a wrong GPU, with FaultTorn some writes leave half a
// cache line unchanged.
const (
	FaultNoFlush        = "no-flush"
	FaultReorderedFlush = "reordered-flush"
	FaultStaleRead      = "stale-read"
	FaultLostTail       = "lost-tail"
	FaultWrongGPU       = "wrong-gpu"
	FaultTorn           = "torn-64"
)

// Faults returns all values of Device.Fault.
func Faults() []string {
	return []string{FaultNoFlush, FaultReorderedFlush, FaultStaleRead, FaultLostTail, FaultWrongGPU, FaultTorn}
}

func (d Device) line() string {
	choose := func(yes bool, a, b string) string {
		if yes {
			return a
		}
		return b
	}
	return fmt.Sprintf(
		"%s guid=%016x transport=%s layer=%s state=%s lid=%d address=%s entry=%s dmabuf=%s peermem=%s holds=%s "+
			"prefix=%x grh=%s ece=%x resize=%s entries=%d direct=%s fault=%s rate=%d seed=%d\n",
		d.Name,
		d.GUID,
		choose(d.IWARP, "iWARP", "IB"),
		choose(d.InfiniBand, "InfiniBand", "Ethernet"),
		choose(d.Down, "DOWN", "ACTIVE"),
		d.LID,
		d.Address,
		choose(d.Moved, "4", "2"),
		choose(d.NoDMABuf, "no", "yes"),
		choose(d.Peermem == "", "no", d.Peermem),
		choose(d.Holds, "yes", "no"),
		cmp.Or(
			d.Prefix,
			0xfe80<<48,
		),
		choose(d.GRH, "yes", "no"),
		d.ECE,
		choose(d.NoResize, "no", "yes"),
		cmp.Or(d.Entries, 65536),
		choose(d.DataDirect, "yes", "no"),
		cmp.Or(d.Fault, "none"),
		d.Rate,
		d.Seed,
	)
}

// Host is a host with such devices.
type Host struct {
	Dir string
}

// New makes a host in a directory.
func New(dir string, devices ...Device) (Host, error) {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return Host{}, err
	}
	h := Host{Dir: dir}
	path, err := library()
	if err != nil {
		return Host{}, err
	}
	text, err := os.ReadFile(path)
	if err != nil {
		return Host{}, err
	}
	// The loader takes two links to a file for a single library.
	return h, errors.Join(
		os.MkdirAll(dir, 0o755),
		os.WriteFile(h.Library(), text, 0o755),
		os.WriteFile(filepath.Join(dir, logName), nil, 0o644),
		h.Set(devices...),
	)
}

// logName is the file of the record. Without the record the library neither records calls nor reads
// a script.
const logName = "log"

// Open lets processes of other users be on this host, without a record of calls and without a script,
// which take time.
func (h Host) Open() error {
	number := filepath.Join(h.Dir, "number")
	err := errors.Join(os.Remove(filepath.Join(h.Dir, logName)), os.Chmod(h.Dir, 0o777), os.WriteFile(number, nil, 0o666))
	return errors.Join(err, os.Chmod(number, 0o666))
}

// Library is the library for processes of this host.
func (h Host) Library() string { return filepath.Join(h.Dir, libraryName) }

// Environment returns the variables for processes of this host.
func (h Host) Environment() []string {
	return []string{verbs.LibraryVariable + "=" + h.Library(), allowed}
}

// allowed lets a process use the software device.
const allowed = verbs.SoftwareVariable + "=" + verbs.SoftwareAllowed

// Apart copies the library into another directory and returns the environment of a process that
// is on this host with it: in a relay's sandbox nothing writable is executable.
func (h Host) Apart(dir string) (environment []string, err error) {
	text, err := os.ReadFile(h.Library())
	if err != nil {
		return nil, err
	}
	path := filepath.Join(dir, libraryName)
	return []string{
			verbs.LibraryVariable + "=" + path,
			directoryVariable + "=" + h.Dir,
			allowed,
		}, os.WriteFile(
			path,
			text,
			0o755,
		)
}

// directoryVariable names a host's directory where the library is elsewhere.
const directoryVariable = "PEERLANE_SOFTDEVICE_DIRECTORY"

// Set replaces the devices. Open devices get events of ports and addresses.
func (h Host) Set(devices ...Device) error {
	var text strings.Builder
	for _, d := range devices {
		text.WriteString(d.line())
	}
	return h.replace("devices", text.String())
}

// Script replaces the faults of calls, a line per fault: the call's name and the error, "ibv_reg_mr
// errno=14 device=mlx5_0 call=2". The form is in libibverbs/host.c. "send status=12" is a send
// request that ends with that completion.
func (h Host) Script(lines ...string) error {
	return h.replace("script", strings.Join(append(lines, ""), "\n"))
}

func (h Host) replace(name, text string) error {
	path := filepath.Join(h.Dir, name)
	if err := os.WriteFile(path+".new", []byte(text), 0o644); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}

// Call is a line of the record: a call and its arguments.
type Call struct {
	pid, Name string
	// Arguments are by name; "=" is the result, an errno.
	Arguments map[string]string
}

// Calls returns the calls so far, of every process, in the order of their ends; with names, only
// calls with these names.
func (h Host) Calls(names ...string) ([]Call, error) {
	f, err := os.Open(filepath.Join(h.Dir, logName))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer f.Close()
	wanted := map[string]bool{}
	for _, n := range names {
		wanted[n] = true
	}
	var calls []Call
	for lines := bufio.NewScanner(f); ; {
		if !lines.Scan() {
			return calls, lines.Err()
		}
		text, result, _ := strings.Cut(lines.Text(), " = ")
		words := strings.Fields(text)
		if len(words) < 2 || len(wanted) > 0 && !wanted[words[1]] {
			continue
		}
		c := Call{pid: words[0], Name: words[1], Arguments: map[string]string{"=": result}}
		for _, w := range words[2:] {
			if name, value, ok := strings.Cut(w, "="); ok {
				c.Arguments[name] = value
			}
		}
		calls = append(calls, c)
	}
}
