package sim

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/cuda"
	"github.com/peerlane/peerlane/integration/programs"
	"github.com/peerlane/peerlane/internal/testutil"
)

func init() {
	children["list"] = list
	children["import"] = importStdin
	children["copies"] = copies
	children["copy for ever"] = copyForEver
	children["faults"] = faults
	children["late"] = late
	children["misuse"] = misuse
	children["ipc"] = ipcEvents
	children["ipc open"] = ipcOpen
}

func TestSourceCompilesWithoutAWarning(t *testing.T) {
	compiler, err := compiler()
	programs.MustHave(t, err)
	files, err := filepath.Glob("libcuda/*.c")
	check(t, err)
	args := append(append([]string{}, flags...), "-Werror", "-o", filepath.Join(t.TempDir(), LibraryName))
	if out, err := exec.Command(compiler, append(args, files...)...).CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}

func TestLibraryExportsTheAPIAlone(t *testing.T) {
	library, err := Library()
	check(t, err)
	nm, err := exec.LookPath("nm") // of the binutils, which the C compiler needs
	programs.MustHave(t, err)
	out, err := exec.Command(nm, "-D", "--defined-only", library).Output()
	check(t, err)
	for line := range strings.Lines(string(out)) {
		f := strings.Fields(line)
		if name := f[len(f)-1]; !strings.HasPrefix(name, "cu") && !strings.HasPrefix(name, "peerlaneSim") {
			t.Errorf("the library exports %s", name)
		}
	}
}

func TestBuildMakesCurrentLibrary(t *testing.T) {
	_, err := compiler()
	programs.MustHave(t, err)
	path := filepath.Join(t.TempDir(), LibraryName)
	if current(path) {
		t.Error("a library that is not there is current")
	}
	check(t, Build(path))
	if !current(path) {
		t.Error("the library just built is not current")
	}
	check(t, os.WriteFile(path, []byte("peerlane-sim-source:of-another"), 0o644))
	if current(path) {
		t.Error("a library of another source is current")
	}
}

func TestHostIsCheckedWhenWritten(t *testing.T) {
	for name, break_ := range map[string]func(d []Device) []Device{
		"no device":       func([]Device) []Device { return nil },
		"bad UUID":        func(d []Device) []Device { d[0].UUID = "GPU-1"; return d },
		"bad address":     func(d []Device) []Device { d[0].BusID = "17:00.0"; return d },
		"no memory":       func(d []Device) []Device { d[1].Memory = 0; return d },
		"no name":         func(d []Device) []Device { d[1].Name = " "; return d },
		"one UUID twice":  func(d []Device) []Device { d[1].UUID = d[0].UUID; return d },
		"one minor twice": func(d []Device) []Device { d[1].Minor = d[0].Minor; return d },
		"too many":        func([]Device) []Device { return devices(maxDevices + 1) },
	} {
		if err := Write(t.TempDir(), break_(devices(2))); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
	dir := host(t, maxDevices)
	logs, err := ReadLog(dir)
	check(t, err)
	var read []Device
	for _, l := range logs {
		read = append(read, l.Device)
	}
	if diff := cmp.Diff(devices(maxDevices), read); diff != "" {
		t.Errorf("devices read back (-want +got):\n%s", diff)
	}
}

// list prints the PCI bus numbers of the devices, in order.
func list() error {
	d, err := cuda.Open()
	if errors.Is(err, cuda.ErrNoDevice) {
		fmt.Println("no device")
		return nil
	}
	if err != nil {
		return err
	}
	n, err := d.DeviceCount()
	if err != nil {
		return err
	}
	for i := range n {
		bus, err := d.DevicePCIBusID(cuda.Device(i))
		if err != nil {
			return err
		}
		fmt.Print(bus[5:7], " ")
	}
	return nil
}

func TestVisibleDevicesFollowEnvironment(t *testing.T) {
	dir := host(t, 4)
	some := []string{"PEERLANE_SIM_VISIBLE=nodes", "PEERLANE_SIM_DEV=" + nodes(t, 1, 3)}
	none := []string{"PEERLANE_SIM_VISIBLE=nodes", "PEERLANE_SIM_DEV=" + nodes(t)}
	for _, c := range []struct {
		name, want string
		env        []string
	}{
		{"all by default", "10 11 12 13", nil},
		{"by node", "11 13", some},
		{"without a node", "no device", none},
		{"by index, in that order", "12 10", []string{"CUDA_VISIBLE_DEVICES=2,0"}},
		{"by index among nodes", "13", append(some, "CUDA_VISIBLE_DEVICES=1")},
		{"by UUID", "12", []string{"CUDA_VISIBLE_DEVICES=GPU-000000a2-0000-4000-8000-000000000000"}},
		{"by the beginning of a UUID", "13 10", []string{"CUDA_VISIBLE_DEVICES=GPU-000000a3,GPU-000000a0"}},
		{"up to a bad name", "11", []string{"CUDA_VISIBLE_DEVICES=1,9,2"}},
		{"by an empty list", "no device", []string{"CUDA_VISIBLE_DEVICES="}},
	} {
		if got := answer(t, dir, "list", c.env...); got != c.want {
			t.Errorf("%s: %s, want %s", c.name, got, c.want)
		}
	}
}

// importStdin imports the memory of the descriptor on standard input.
func importStdin() error {
	d, err := cuda.Open()
	if err != nil {
		return err
	}
	h, err := d.MemImportFD(0)
	if errors.Is(err, cuda.ErrInvalidDevice) {
		fmt.Println("invalid device")
		return nil
	}
	if err != nil {
		return err
	}
	p, err := d.MemProperties(h)
	fmt.Println("imported, device", p.Device)
	return errors.Join(err, d.MemRelease(h))
}

func TestImportNeedsTheNode(t *testing.T) {
	dir := host(t, 2)
	// Memory of device 1, by a driver in this process.
	fd := exportFrom(t, dir)
	for _, c := range []struct {
		name, want string
		env        []string
	}{
		{"all visible", "imported, device 1", nil},
		{"hidden", "imported, device -1", []string{"CUDA_VISIBLE_DEVICES=0"}},
		{"without the node", "invalid device", []string{"PEERLANE_SIM_VISIBLE=nodes", "PEERLANE_SIM_DEV=" + nodes(t, 0)}},
		{"with that node only", "imported, device 0", []string{"PEERLANE_SIM_VISIBLE=nodes",
			"PEERLANE_SIM_DEV=" + nodes(t, 1)}},
	} {
		cmd := command(t, dir, "import", c.env...)
		cmd.Stdin = fd
		out, err := cmd.Output()
		check(t, err)
		if got := strings.TrimSpace(string(out)); got != c.want {
			t.Errorf("%s: %s, want %s", c.name, got, c.want)
		}
	}
}

// exportFrom runs a child that sends memory of device 1 and exits: the descriptor keeps the memory.
func exportFrom(t *testing.T, dir string) *os.File {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	check(t, err)
	ours, theirs := os.NewFile(uintptr(fds[0]), "ours"), os.NewFile(uintptr(fds[1]), "theirs")
	defer func() { check(t, errors.Join(ours.Close(), theirs.Close())) }()
	cmd := command(t, dir, "export")
	cmd.ExtraFiles = []*os.File{theirs}
	check(t, cmd.Run())
	conn, err := net.FileConn(ours)
	check(t, err)
	defer func() { check(t, conn.Close()) }()
	oob := make([]byte, 64)
	_, n, _, _, err := conn.(*net.UnixConn).ReadMsgUnix(make([]byte, 1), oob)
	check(t, err)
	messages, err := syscall.ParseSocketControlMessage(oob[:n])
	check(t, err)
	rights, err := syscall.ParseUnixRights(&messages[0])
	check(t, err)
	f := os.NewFile(uintptr(rights[0]), "memory")
	t.Cleanup(func() { check(t, f.Close()) })
	return f
}

func init() {
	children["export"] = func() error {
		d, err := cuda.Open()
		if err != nil {
			return err
		}
		h, err := d.MemCreate(1, 2*mib, cuda.MemOptions{Exportable: true})
		if err != nil {
			return err
		}
		fd, err := d.MemExportFD(h)
		if err != nil {
			return err
		}
		return unix.Sendmsg(3, []byte{0}, unix.UnixRights(fd), nil, 0)
	}
}

// copies makes the copies that TestLogCountsCopies counts.
func copies() error {
	p, err := begin(0, 1)
	if err != nil {
		return err
	}
	host, err := p.MemHostAlloc(mib)
	if err != nil {
		return err
	}
	return errors.Join(
		p.MemcpyAsync(p.b, p.a, 1000, p.s),       // 0 to 1
		p.MemcpyAsync(p.a, p.b, 200, p.s),        // 1 to 0
		p.MemcpyAsync(p.a+mib, p.a, 30, p.s),     // within 0
		p.MemcpyHtoDAsync(p.b, host, 4, p.s),     // host to 1
		p.MemcpyDtoHAsync(host, p.a, 50000, p.s), // 0 to host
		p.MemcpyAsync(p.b+4*mib-8, p.a, 8, p.s),  // up to the end of the memory
		p.StreamSynchronize(p.s), p.CtxDestroy(p.ctx))
}

func TestLogCountsCopies(t *testing.T) {
	dir := host(t, 3)
	// Several concurrent processes; one more is killed while copying on device 2.
	killed := command(t, dir, "copy for ever", "CUDA_VISIBLE_DEVICES=2")
	check(t, killed.Start())
	testutil.Until(t, "copies of the process to be killed", func() bool {
		logs, err := ReadLog(dir)
		check(t, err)
		return logs[2].BytesWithin > 0
	})
	const processes = 4
	done := make(chan error)
	for range processes {
		cmd := command(t, dir, "copies")
		go func() { done <- cmd.Run() }()
	}
	for range processes {
		check(t, <-done)
	}
	check(t, killed.Process.Kill())
	_ = killed.Wait() // "signal: killed"
	logs, err := ReadLog(dir)
	check(t, err)
	if n := logs[2].BytesWithin; n == 0 || n%(4*mib) != 0 {
		t.Errorf("the killed process copied %d bytes, not a whole number of copies", n)
	}
	d := devices(3)
	want := []DeviceLog{
		// within 0, and 4 bytes of the host
		{Device: d[0], BytesIn: 200 * processes, BytesOut: 51008 * processes, BytesWithin: 30 * processes,
			Copies: 5 * processes, Contexts: processes, Allocated: 4 * mib * processes, Slices: 2 * processes},
		{Device: d[1], BytesIn: 1012 * processes, BytesOut: 200 * processes, Copies: 4 * processes,
			Allocated: 4 * mib * processes},
	}
	if diff := cmp.Diff(want, logs[:2]); diff != "" {
		t.Errorf("log (-want +got):\n%s", diff)
	}
}

func copyForEver() error {
	p, err := begin(0, 0)
	for err == nil {
		err = errors.Join(p.MemcpyAsync(p.a, p.b, 4*mib, p.s), p.StreamSynchronize(p.s))
	}
	return err
}

func TestProcessWithoutHostIsError(t *testing.T) {
	dir := host(t, 1)
	for _, c := range []struct{ name, env, want string }{
		{"no directory", "PEERLANE_SIM=" + filepath.Join(dir, "none"), "none/host: No such file or directory"},
		{"no variable", "PEERLANE_SIM=", "PEERLANE_SIM is not set"},
	} {
		cmd := command(t, dir, "list", c.env)
		var text strings.Builder
		cmd.Stderr = &text
		if err := cmd.Run(); err == nil {
			t.Errorf("%s: succeeded", c.name)
		}
		if !strings.Contains(text.String(), c.want) || !strings.Contains(text.String(), "CUDA_ERROR_OPERATING_SYSTEM") {
			t.Errorf("%s: %s; want %q", c.name, text.String(), c.want)
		}
	}
}

// faults copies three times, and prints the result of each call.
func faults() error {
	p, err := begin(0, 0)
	if err != nil {
		fmt.Println("begin", result(err))
		return nil
	}
	if err := p.copyString(p.a, "abcdefgh"); err != nil {
		return err
	}
	for range 3 {
		fmt.Print(result(p.MemcpyAsync(p.b, p.a, 8, p.s)), " ", result(p.StreamSynchronize(p.s)))
		text, err := p.readString(p.b, 8)
		fmt.Print(" ", strings.Trim(text, "\x00"), result(err), "; ")
	}
	return nil
}

func result(err error) string {
	var r cuda.Result
	if err == nil {
		return "0"
	}
	if !errors.As(err, &r) {
		return err.Error()
	}
	return strconv.Itoa(int(r))
}

func TestFaultsChangeResults(t *testing.T) {
	dir := host(t, 1)
	const good = "0 0 abcdefgh0;"
	of := func(process string) string {
		file := filepath.Join(t.TempDir(), "process")
		if err := os.WriteFile(file, []byte(process+"\n"), 0o644); err != nil {
			t.Fatal(err)
		}
		return file
	}
	for _, c := range []struct{ fault, want string }{
		{"", good + " " + good + " " + good},
		{"cuMemcpyAsync:after=1:times=1:error=1", good + " 1 0 abcdefgh0; " + good},
		{"cuMemcpyAsync:after=1:error=700", good + " 0 700 700; 700 700 700;"},
		{"cuMemcpyAsync:times=1:corrupt=1", "0 0 abcd\x3ffgh0; " + good + " " + good},
		{"cuMemcpyA*:after=1:corrupt=1", good + " 0 0 abcd\x3ffgh0; 0 0 abcd\x3ffgh0;"},
		{"cuMemcpyAsync:delay=20", good + " " + good + " " + good},
		{"cuMemCreate:oom", "begin 2"},
		{"cuCtxCreate:error=46", "begin 46"},
		{"cuMemcpyAsync:after=1:lost", good + " 999 999 999; 999 999 999;"},
		{"cuMemcpyAsync:after=1:times=1:error=1;cuStreamSynchronize:after=2:error=719", good + " 1 719 719; 719 719 719;"},
		{"cuMemcpyAsync:process=" + of("0") + ":after=1:error=700", good + " 0 700 700; 700 700 700;"},
		{"cuMemcpyAsync:process=" + of("1") + ":lost", good + " " + good + " " + good},
		{"cuMemcpyAsync:process=" + of("") + ":lost", good + " " + good + " " + good},
		{"cuMemcpyAsync:process=/nowhere:lost", good + " " + good + " " + good},
		{"cuMemcpyAsync:somehow", "begin 1"},
	} {
		if got := answer(t, dir, "faults", "PEERLANE_SIM_FAULT="+c.fault); got != c.want {
			t.Errorf("%s:\n got %q\nwant %q", c.fault, got, c.want)
		}
	}
}

// The library of forward/ injects faults into the calls of another library. Here the other library
// is the simulator, which then has no faults.
func TestForwardedCallsMeetFaults(t *testing.T) {
	dir := host(t, 1)
	build := exec.CommandContext(t.Context(), "make", "-C", "../..", "bin/libpeerlane-cuda-faults.so")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	forward, err := filepath.Abs("../../bin/libpeerlane-cuda-faults.so")
	check(t, err)
	simulator, err := Library()
	check(t, err)
	const good = "0 0 abcdefgh0;"
	for _, c := range []struct{ fault, want string }{
		{"", good + " " + good + " " + good},
		{"cuMemcpyAsync:after=1:times=1:error=1", good + " 1 0 abcdefgh0; " + good},
		{"cuMemcpyAsync:after=1:error=700", good + " 700 700 700; 700 700 700;"},
		{"cuMemCreate:oom", "begin 2"},
		{"cuMemcpyAsync:after=1:lost", good + " 999 999 999; 999 999 999;"},
	} {
		calls := filepath.Join(t.TempDir(), "calls")
		got := answer(t, dir, "faults", cuda.LibraryVariable+"="+forward, "PEERLANE_FORWARD_TO="+simulator,
			"PEERLANE_FORWARD_FAULT="+c.fault, "PEERLANE_FORWARD_CALLS="+calls)
		if got != c.want {
			t.Errorf("%s:\n got %q\nwant %q", c.fault, got, c.want)
		}
		if list, err := os.ReadFile(calls); err != nil || !slices.Contains(strings.Fields(string(list)), "cuMemCreate") {
			t.Errorf("%s: the list of calls lacks cuMemCreate: %q, %v", c.fault, list, err)
		}
	}
}

// late queries a copy without synchronization, then synchronizes by every available call. The delay
// is an hour, so only synchronization completes the copy.
func late() error {
	p, err := begin(0, 0)
	if err != nil {
		return err
	}
	e, err := p.EventCreate(cuda.EventOptions{})
	if err != nil {
		return err
	}
	other, err := p.StreamCreate()
	if err != nil {
		return err
	}
	for _, wait := range []func() error{
		func() error { return p.StreamSynchronize(p.s) },
		func() error { return p.EventSynchronize(e) },
		func() error { return p.CtxSynchronize() },
		func() error { return errors.Join(p.StreamWaitEvent(other, e), p.StreamSynchronize(other)) },
	} {
		if err := errors.Join(p.MemcpyAsync(p.b, p.a, mib, p.s), p.EventRecord(e, p.s)); err != nil {
			return err
		}
		time.Sleep(20 * time.Millisecond)
		stream, err1 := p.StreamQuery(p.s)
		event, err2 := p.EventQuery(e)
		if err := errors.Join(err1, err2); err != nil {
			return err
		}
		if stream || event {
			return errors.New("a copy completed without synchronization")
		}
		if err := wait(); err != nil {
			return err
		}
		if done, err := p.StreamQuery(p.s); err != nil || !done {
			return fmt.Errorf("a copy that was waited for: %v, %w", done, err)
		}
	}
	// A context can be destroyed with pending work.
	return errors.Join(p.MemcpyAsync(p.b, p.a, mib, p.s), p.CtxDestroy(p.ctx))
}

func TestLateCopyNeedsSynchronization(t *testing.T) {
	answer(t, host(t, 1), "late", "PEERLANE_SIM_LATE_MS=3600000")
}

func TestLateCopyArrivesWithoutCall(t *testing.T) {
	answer(t, host(t, 1), "late short", "PEERLANE_SIM_LATE_MS=20")
}

func init() {
	children["late short"] = func() error {
		p, err := begin(0, 0)
		if err != nil {
			return err
		}
		if err := p.MemcpyAsync(p.b, p.a, mib, p.s); err != nil {
			return err
		}
		for deadline := testutil.Begin(); !deadline.Over(); time.Sleep(time.Millisecond) {
			if done, err := p.StreamQuery(p.s); err != nil || done {
				return err
			}
		}
		return errors.New("the copy never came")
	}
}

// misuse makes calls that a program must not make, and calls that follow a sticky error.
func misuse() error {
	p, err := begin(0, 0)
	if err != nil {
		return err
	}
	var wrong []error
	expect := func(what string, err error, want cuda.Result) {
		if want == 0 && err != nil || want != 0 && !errors.Is(err, want) {
			wrong = append(wrong, fmt.Errorf("%s: %v, want %v", what, err, want))
		}
	}
	expect("no such stream", p.StreamSynchronize(12345), cuda.ErrInvalidHandle)
	s, err := p.StreamCreate()
	expect("a stream", err, 0)
	expect("its end", p.StreamDestroy(s), 0)
	expect("its second end", p.StreamDestroy(s), cuda.ErrInvalidHandle)
	expect("work for it", p.MemcpyAsync(p.a, p.b, 8, s), cuda.ErrInvalidHandle)
	expect("no such event", p.EventRecord(cuda.Event(p.s), p.s), cuda.ErrInvalidHandle)
	expect("no such memory", p.MemRelease(1), cuda.ErrInvalidValue)
	expect("no such context", p.CtxSetCurrent(1), cuda.ErrInvalidContext)
	expect("a copy over the end", p.MemcpyAsync(p.a+4*mib-4, p.b, 8, p.s), cuda.ErrInvalidValue)
	expect("a part of a mapping", p.MemUnmap(p.a, 2*mib), cuda.ErrInvalidValue)
	expect("addresses with memory", p.MemAddressFree(p.a, 4*mib), cuda.ErrInvalidValue)
	expect("access to a part", p.MemSetAccess(p.a, 2*mib, cuda.Access{Device: 0}), cuda.ErrInvalidValue)
	expect("a value at an odd address", p.StreamWriteValue64(p.s, p.a+4, 1), cuda.ErrInvalidValue)
	expect("a copy from nowhere", p.MemcpyAsync(p.a, 4096, 8, p.s), cuda.ErrInvalidValue)
	readOnly, err := p.memory(0, 2*mib, false)
	expect("read-only memory", err, 0)
	expect("a copy out of it", p.MemcpyAsync(p.a, readOnly, 8, p.s), 0)
	expect("a copy into it", p.MemcpyAsync(readOnly, p.a, 8, p.s), cuda.ErrInvalidValue)
	h, err := p.MemRetain(p.a)
	expect("a handle", err, 0)
	expect("memory at an offset", p.MemMap(p.b, 2*mib, 2*mib, h), cuda.ErrInvalidValue)
	expect("memory over other memory", p.MemMap(p.b, 4*mib, 0, h), cuda.ErrInvalidValue)
	expect("its release", p.MemRelease(h), 0)
	expect("its second release", p.MemRelease(h), cuda.ErrInvalidValue)

	// A page that is unmapped during the work of a stream stays pinned.
	page, err := unix.Mmap(-1, 0, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_ANONYMOUS)
	expect("a page", err, 0)
	at := unsafe.Pointer(&page[0])
	expect("its registration", p.MemHostRegister(at, 4096), 0)
	address, err := p.MemHostDevicePtr(at)
	expect("its address", err, 0)
	expect("a wait for it", p.StreamWaitValue64(p.s, address, 1), 0)
	expect("its end", unix.Munmap(page), 0)
	time.Sleep(5 * time.Millisecond)
	if done, err := p.StreamQuery(p.s); err != nil || done {
		wrong = append(wrong, fmt.Errorf("a wait for an unmapped page: %v, %w", done, err))
	}
	other, err := p.StreamCreate()
	expect("another stream", err, 0)
	expect("the value", p.StreamWriteValue64(other, address, 1), 0)
	expect("the wait's end", p.StreamSynchronize(p.s), 0)

	// A context can be destroyed while a stream waits for a value that no process writes.
	expect("a wait for ever", p.StreamWaitValue64(p.s, address, 2), 0)
	expect("the context's end", p.CtxDestroy(p.ctx), 0)
	expect("its second end", p.CtxDestroy(p.ctx), cuda.ErrInvalidContext)
	return errors.Join(wrong...)
}

func TestMisuseIsRefused(t *testing.T) { answer(t, host(t, 1), "misuse") }

// A killed process leaves only the files of its interprocess events, until the next process creates
// such an event.
func TestKilledProcessesLeaveNothing(t *testing.T) {
	dir := host(t, 1)
	cmd := command(t, dir, "ipc")
	out, err := cmd.StdoutPipe()
	check(t, err)
	check(t, cmd.Start())
	var line [256]byte
	n, err := out.Read(line[:])
	check(t, err)
	mine := func() (files []string) {
		entries, err := os.ReadDir("/dev/shm")
		check(t, err)
		for _, e := range entries {
			if strings.HasPrefix(e.Name(), fmt.Sprintf("cuda.sim.%d.%d.", os.Geteuid(), cmd.Process.Pid)) {
				files = append(files, e.Name())
			}
		}
		return files
	}
	if files := mine(); len(files) != 1 {
		t.Errorf("files of the process: %v, want one", files)
	}
	handle := strings.TrimSpace(string(line[:n]))
	if os.Geteuid() == 0 {
		if got := answer(t, dir, "ipc open", "HANDLE="+handle, "AS=65534"); got != "205" {
			t.Errorf("opening the event as another user: %s, want 205, CUDA_ERROR_MAP_FAILED", got)
		}
	}
	if got := answer(t, dir, "ipc open", "HANDLE="+handle); got != "0" {
		t.Errorf("opening the event: %s, want 0", got)
	}
	check(t, cmd.Process.Kill())
	_ = cmd.Wait() // "signal: killed"
	if got := answer(t, dir, "ipc open", "HANDLE="+handle, "CREATE=1"); got != "205" {
		t.Errorf("opening a dead process's event: %s, want 205, CUDA_ERROR_MAP_FAILED", got)
	}
	if files := mine(); len(files) != 0 {
		t.Errorf("the killed process's files are left: %v", files)
	}
}

// ipcEvents creates an interprocess event, prints the handle and waits until the test kills the
// process.
func ipcEvents() error {
	p, err := begin(0, 0)
	if err != nil {
		return err
	}
	e, err := p.EventCreate(cuda.EventOptions{Interprocess: true})
	if err != nil {
		return err
	}
	h, err := p.IPCGetEventHandle(e)
	if err != nil {
		return err
	}
	if _, err := p.IPCOpenEventHandle(h); !errors.Is(err, cuda.ErrInvalidContext) {
		return fmt.Errorf("open an event of the same process: %w", err)
	}
	fmt.Printf("%x\n", h)
	time.Sleep(time.Minute)
	return errors.New("the test did not kill this process")
}

func ipcOpen() error {
	p, err := begin(0, 0)
	if err != nil {
		return err
	}
	if uid, err := strconv.Atoi(os.Getenv("AS")); err == nil {
		if err := syscall.Setuid(uid); err != nil {
			return err
		}
	}
	var h []byte
	if _, err := fmt.Sscanf(os.Getenv("HANDLE"), "%x", &h); err != nil {
		return err
	}
	if os.Getenv("CREATE") != "" {
		e, err := p.EventCreate(cuda.EventOptions{Interprocess: true})
		if err = errors.Join(err, p.EventDestroy(e)); err != nil {
			return err
		}
	}
	_, err = p.IPCOpenEventHandle([64]byte(h))
	fmt.Println(result(err))
	return nil
}
