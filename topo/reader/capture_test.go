package reader

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/peerlane/peerlane/internal/testutil"
	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/internal/topotest"
)

func capture(t testing.TB, o topo.Options) []byte {
	t.Helper()
	var b bytes.Buffer
	if err := Capture(o, &b); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// sameHost compares a host with the host that ReadCapture returns for a capture. Notes contain the
// paths of files. In a capture, the roots are always /sys and /proc.
func sameHost(t *testing.T, o topo.Options) {
	t.Helper()
	want, err := Sysfs(o)
	if err != nil {
		t.Fatal(err)
	}
	got, err := hostOfCapture(bytes.NewReader(capture(t, o)))
	if err != nil {
		t.Fatal(err)
	}
	want.Source = topo.Source{Kind: sourceCapture}
	for i := range want.Notes {
		want.Notes[i] = strings.NewReplacer(o.Sysfs+"/", "/sys/", o.Sysfs, "/sys", o.Proc+"/",
			"/proc/").Replace(want.Notes[i])
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("host (-) and capture (+):\n%s", diff)
	}
}

// variedHost has a device for every kind of file that the readers use.
func variedHost() map[string]string {
	const (
		port   = "pci0000:10/0000:10:01.0"
		nic    = port + "/0000:11:00.0"
		bridge = "LNXSYSTM:00/LNXSYBUS:00/ACPI0004:00/VMBUS:01/47505500-0001-0000-3130-444532304235/pci0001:00/0001:00:00.0"
	)
	files := map[string]string{
		"sys/devices/system/node/node0/cpulist":  "0-3",
		"sys/devices/system/node/node0/distance": "10 21",
		"sys/devices/system/node/node1/cpulist":  "4-7",
		"sys/devices/system/node/online":         "0-1",
		"proc/cpuinfo": "processor\t: 0\nvendor_id\t: GenuineIntel\ncpu family\t: " +
			"6\nmodel\t\t: 207\ncpu MHz\t: 1\n\nprocessor\t: 1\n",
		"proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  " +
			"580.95.05  Release Build  (root@node17)  Tue Sep 23 10:11:55 UTC 2025\nGCC version:  gcc version 12.2.0",
		"proc/driver/nvidia/gpus/0001:00:00.0/information": "Model: \t\t NVIDIA H200\nIRQ:   \t\t 200\nGPU UUID: \t " +
			"GPU-be79431d-799f-0a79-d1fe-60a2543bc9b7\nBoard Serial: \t 1650123\nDevice Minor: \t 3",

		"sys/class/infiniband/mlx5_0":                            "-> ../../devices/" + nic + "/infiniband/mlx5_0",
		"sys/devices/" + nic + "/infiniband/mlx5_0/device":       "-> ../../../0000:11:00.0",
		"sys/devices/" + nic + "/infiniband/mlx5_0/node_guid":    "a088:c203:00a1:40e0",
		"sys/devices/" + nic + "/infiniband/mlx5_0/node_desc":    "node17 mlx5_0",
		"sys/devices/" + nic + "/infiniband/mlx5_0/board_id":     "MT_SERIAL",
		"sys/devices/" + nic + "/net/eth7/address":               "a0:88:c2:a1:40:e0",
		"sys/devices/" + nic + "/vpd":                            "MT1650X12345",
		"sys/devices/" + nic + "/serial_number":                  "12-34-56",
		"sys/devices/" + nic + "/uevent":                         "DRIVER=mlx5_core",
		"sys/class/infiniband_verbs/uverbs0":                     "-> ../../devices/" + nic + "/infiniband_verbs/uverbs0",
		"sys/devices/" + nic + "/infiniband_verbs/uverbs0/ibdev": "mlx5_0",
		"sys/class/infiniband_verbs/abi_version":                 "6",

		"sys/class/infiniband/mlx5_9": "-> ../../devices/" +
			nic + "/mlx5_core.sf.4/infiniband/mlx5_9",
		"sys/devices/" + nic + "/mlx5_core.sf.4/infiniband/mlx5_9/device":        "-> ../../../mlx5_core.sf.4",
		"sys/devices/" + nic + "/mlx5_core.sf.4/infiniband/mlx5_9/ports/2/state": "1: DOWN",
		"sys/devices/" + nic + "/mlx5_core.sf.4/infiniband/mlx5_9/ports/2/rate":  "10 Gb/sec (4X SDR)",

		"sys/class/infiniband/rxe0":                              "-> ../../devices/virtual/infiniband/rxe0",
		"sys/devices/virtual/infiniband/rxe0/parent":             "eth7",
		"sys/devices/virtual/infiniband/rxe0/ports/1/state":      "4: ACTIVE",
		"sys/class/infiniband/siw0":                              "-> ../../devices/virtual/infiniband/siw0",
		"sys/devices/virtual/infiniband/siw0/device":             "-> ../../../" + nic + "/net/eth7",
		"sys/devices/virtual/infiniband/siw0/ports/1/state":      "4: ACTIVE",
		"sys/class/infiniband_verbs/uverbs5":                     "-> ../../devices/virtual/infiniband_verbs/uverbs5",
		"sys/devices/virtual/infiniband_verbs/uverbs5/ibdev":     "siw0",
		"sys/bus/pci/drivers/a driver of two words/0001:00:00.0": "-> ../../../../devices/" + bridge,
		"sys/bus/pci/drivers/mlx5_core/module/srcversion":        "1",
	}
	topotest.Device(files, port, "class=0x060400", "vendor=0x8086", "numa_node=0")
	topotest.Device(files, nic, "class=0x020700", "vendor=0x15b3", "numa_node=0",
		"driver=-> ../../../../bus/pci/drivers/mlx5_core")
	topotest.Device(files, nic[:len(nic)-1]+"1", "class=0x020700", "vendor=0x15b3", "numa_node=0",
		"physfn=-> ../0000:11:00.0")
	topotest.Device(files, bridge, topotest.GPUClass, topotest.GPUVendor, "numa_node=-1", "max_link_speed=32.0 GT/s PCIe",
		"max_link_width=16",
		"driver=-> ../../../../../../../../bus/pci/drivers/nvidia")
	return files
}

func TestCaptureOfHostReadsAsSameHost(t *testing.T) {
	sameHost(t, topotest.Tree(t, variedHost()))
}

// traced remembers which files were read.
type traced struct {
	machine
	read map[string]bool
}

func (f traced) ReadFile(path string) ([]byte, error) {
	text, err := f.machine.ReadFile(path)
	if err == nil {
		if at, err := f.Resolve(path); err == nil {
			f.read[at] = true
		}
	}
	return text, err
}

// Record must take each file that a reader uses.
func TestCaptureHasEveryFileOfReaders(t *testing.T) {
	o := topotest.Tree(t, variedHost())
	read := map[string]bool{}
	if _, err := readHost(o, traced{read: read}); err != nil {
		t.Fatal(err)
	}
	all := members(t, capture(t, o))
	root, err := filepath.EvalSymlinks(filepath.Dir(o.Sysfs))
	if err != nil {
		t.Fatal(err)
	}
	for at := range read {
		if _, ok := all[strings.TrimPrefix(at, root+"/")]; !ok {
			t.Errorf("the reader looks at %s, and a capture has no such file", at)
		}
	}
	if len(read) < 20 {
		t.Errorf("only %d files were read", len(read))
	}
}

func TestCaptureOfEmptyTreeReadsAsEmptyHost(t *testing.T) {
	sameHost(t, topotest.Tree(t, map[string]string{"sys/bus/pci/rescan": ""}))
	sameHost(t, topo.Options{Sysfs: filepath.Join(t.TempDir(), "sys"), Proc: filepath.Join(t.TempDir(), "proc")})
}

func TestCapturesOfEqualHostsAreEqual(t *testing.T) {
	a, b := topotest.Tree(t, variedHost()), topotest.Tree(t, variedHost())
	if !bytes.Equal(capture(t, a), capture(t, b)) {
		t.Error("two captures of equal hosts differ")
	}
}

func TestCaptureKeepsAnswerOfNVML(t *testing.T) {
	o := topotest.Tree(t, variedHost())
	for name, nvml := range map[string]topo.NVML{
		"GPUs": fakeNVML{gpus: []topo.NVMLGPU{{
			Index: 5, BusID: "00000001:00:00.0", UUID: "GPU-1", Name: "NVIDIA H200", Minor: 3, MIG: true, Capability: 90,
			NVLinks: map[string]int{"": 18},
		}}},
		"GPUs in trouble": fakeNVML{
			gpus: []topo.NVMLGPU{{BusID: "00000001:00:00.0", Lost: true, Failures: []string{"nvmlDeviceGetUUID: GPU is lost"},
				NVLinksCPU: 2, C2C: 10, C2CBandwidth: 44000}},
			err: errors.New("nvmlShutdown: Unknown Error"),
		},
		"a failure":  fakeNVML{err: errors.New("nvmlInit: Driver Not Loaded")},
		"no library": fakeNVML{err: fmt.Errorf("%w: nowhere", topo.ErrNoNVML)},
	} {
		t.Run(name, func(t *testing.T) {
			o.NVML = nvml
			sameHost(t, o)
		})
	}
}

type fakeNVML struct {
	gpus []topo.NVMLGPU
	err  error
}

func (f fakeNVML) GPUs() ([]topo.NVMLGPU, error) { return f.gpus, f.err }

// members returns the members of a capture by path: the content of a file, and "-> " before the
// target of a link.
func members(t *testing.T, captured []byte) map[string]string {
	t.Helper()
	z, err := gzip.NewReader(bytes.NewReader(captured))
	if err != nil {
		t.Fatal(err)
	}
	found := map[string]string{}
	r := tar.NewReader(z)
	for {
		m, err := r.Next()
		if err == io.EOF {
			return found
		}
		if err != nil {
			t.Fatal(err)
		}
		text, err := io.ReadAll(r)
		if err != nil {
			t.Fatal(err)
		}
		if _, twice := found[m.Name]; twice {
			t.Errorf("%s occurs twice", m.Name)
		}
		if found[m.Name] = string(text); m.Typeflag == tar.TypeSymlink {
			found[m.Name] = "-> " + m.Linkname
		}
		if !m.ModTime.IsZero() && m.ModTime.Unix() != 0 || m.Uid != 0 || m.Uname != "" {
			t.Errorf("%s has a time or an owner: %+v", m.Name, m)
		}
	}
}

func TestCaptureOmitsSerialNumbersAndNames(t *testing.T) {
	o := topotest.Tree(t, variedHost())
	config := make([]byte, 4096)
	copy(config[0x100:], "\x03\x00\x01\x00SERIALNO")
	if err := os.WriteFile(filepath.Join(o.Sysfs, "devices/pci0000:10/0000:10:01.0/config"), config, 0o644); err != nil {
		t.Fatal(err)
	}
	all := members(t, capture(t, o))
	for name, text := range all {
		for _, secret := range []string{"node17", "SERIAL", "1650", "12-34-56", "a0:88", "root@", "IRQ"} {
			if strings.Contains(name+text, secret) {
				t.Errorf("%s has %q:\n%s", name, secret, text)
			}
		}
	}
	for name, want := range map[string]string{
		"proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  " +
			"580.95.05  Release Build  Tue Sep 23 10:11:55 UTC 2025\nGCC version:  gcc version 12.2.0\n",
		"proc/driver/nvidia/gpus/0001:00:00.0/information": "Model: \t\t NVIDIA H200\nGPU UUID: \t " +
			"GPU-be79431d-799f-0a79-d1fe-60a2543bc9b7\nDevice Minor: \t 3\n",
		"sys/class/infiniband/rxe0": "-> ../../devices/virtual/infiniband/rxe0",
	} {
		if all[name] != want {
			t.Errorf("%s is %q, want %q", name, all[name], want)
		}
	}
}

func TestWithoutSerialsKeepsLinkCapabilities(t *testing.T) {
	config := bytes.Repeat([]byte{0xee}, 4096) // bytes of 0xee must disappear
	config[configStatus] = statusCapabilities
	config[configCapabilities] = 0x40
	standard := func(at int, id, next byte) { config[at], config[at+1] = id, next }
	standard(0x40, 0x01, 0x50)                 // power management
	standard(0x50, capabilityPCIExpress, 0x70) // version 1 of the capability, ..
	standard(0x70, 0x03, 0xb0)                 // .. before vital product data
	standard(0xb0, capabilitySubsystem, 0x40)  // and round again
	extended := func(at int, id uint16, next int) {
		binary.LittleEndian.PutUint32(config[at:], uint32(id)|1<<16|uint32(next)<<20)
	}
	extended(0x100, 0x0003, 0x148) // serial number
	extended(0x148, extendedACS, 0x200)
	extended(0x200, 0x000b, 0xffc) // a vendor's
	extended(0xffc, extendedSRIOV, 0x100)

	want := make([]byte, 4096)
	for _, r := range [][2]int{
		{0, 0x40}, {0x40, 0x42}, {0x50, 0x70}, {0x70, 0x72}, {0xb0, 0xb8},
		{0x100, 0x104}, {0x148, 0x150}, {0x200, 0x204}, {0xffc, 0x1000},
	} {
		copy(want[r[0]:r[1]], config[r[0]:r[1]])
	}
	got := withoutSerials(config)
	if !bytes.Equal(got, want) {
		for i := range got {
			if got[i] != want[i] {
				t.Fatalf("at %#x it has %#x, want %#x", i, got[i], want[i])
			}
		}
	}
	if !bytes.Equal(withoutSerials(got), got) {
		t.Error("what was kept is not kept again")
	}
	last := make([]byte, 4096)
	last[configStatus], last[configCapabilities], last[0xfc] = statusCapabilities, 0xfc, capabilityPCIExpress
	copy(last[0x110:], "SERIAL")
	if bytes.Contains(withoutSerials(last), []byte("SERIAL")) {
		t.Error("a capability reaches into the extended space")
	}
	for _, size := range []int{0, 1, 6, 0x34, 0x3f, 0x40, 0x42, 0x52, 0xff, 0x100, 0x104, 0x14c} {
		if part := withoutSerials(config[:size]); len(part) != size || !bytes.Equal(part, want[:size]) {
			t.Errorf("the first %d bytes are kept as % x", size, part)
		}
	}
}

// pack makes a capture of members: a name that ends with a slash is a
// directory, a text that begins with "-> " a link.
func pack(t testing.TB, names []string, texts ...string) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for i, name := range names {
		h := tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: 0o644}
		text := texts[i]
		if target, ok := strings.CutPrefix(text, "-> "); ok {
			h.Typeflag, h.Linkname, text = tar.TypeSymlink, target, ""
		} else if strings.HasSuffix(name, "/") {
			h.Typeflag = tar.TypeDir
		}
		h.Size = int64(len(text))
		if err := w.WriteHeader(&h); err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(w, text); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return compress(t, b.Bytes())
}

func compress(t testing.TB, data []byte) []byte {
	t.Helper()
	var b bytes.Buffer
	z := gzip.NewWriter(&b)
	if _, err := z.Write(data); err != nil {
		t.Fatal(err)
	}
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

const headText = `{"peerlaneCapture": 1}`

func TestReadCaptureHostileInputFails(t *testing.T) {
	member := func(name, text string) []byte { return pack(t, []string{captureHead, name}, headText, text) }
	two := func(name, text, other, more string) []byte {
		return pack(t, []string{captureHead, name, other}, headText, text, more)
	}
	head := func(text string) []byte { return pack(t, []string{captureHead}, text) }
	special := func(h tar.Header) []byte {
		var b bytes.Buffer
		w := tar.NewWriter(&b)
		for _, h := range []tar.Header{{Name: captureHead, Typeflag: tar.TypeReg, Size: int64(len(headText))}, h} {
			if err := w.WriteHeader(&h); err != nil {
				t.Fatal(err)
			}
			if h.Name == captureHead {
				if _, err := io.WriteString(w, headText); err != nil {
					t.Fatal(err)
				}
			}
		}
		return compress(t, b.Bytes()) // not closed: Close demands the content
	}
	deep := strings.Repeat("a/", maxCapturePath/2)
	for name, c := range map[string]struct {
		capture []byte
		number  int // of the member; 0 for none
		want    error
	}{
		"nothing":                {nil, 0, errNotGzip},
		"no gzip":                {[]byte("<system/>"), 0, errNotGzip},
		"gzip of nothing":        {compress(t, nil), 1, io.EOF},
		"gzip of a text":         {compress(t, []byte(strings.Repeat("text ", 300))), 1, tar.ErrHeader},
		"another tar":            {pack(t, []string{"etc/passwd"}, "root"), 1, &otherTarError{"etc/passwd"}},
		"a head that is a link":  {pack(t, []string{captureHead}, "-> sys"), 1, &otherTarError{captureHead}},
		"a head that is no JSON": {head("{"), 1, &json.SyntaxError{Offset: 1}},
		"another format":         {head(`{"peerlaneCapture": 2}`), 1, &formatError{2}},
		"no format":              {head(`{}`), 1, &formatError{0}},
		"NVML with an index below 0": {head(`{"peerlaneCapture": 1, "nvml": {"gpus": [{"Index": -1}]}}`), 1,
			&answerError{0, "index -1, minor 0 or capability 0"}},
		"NVML with too many links": {head(`{"peerlaneCapture": 1, "nvml": {"gpus": [{"NVLinks": {"": 1000000000}}]}}`), 1,
			&answerError{0, "number of NVLinks"}},
		"NVML with links below 0": {head(`{"peerlaneCapture": 1, "nvml": {"gpus": [{"NVLinks": {"": -5}}]}}`), 1,
			&answerError{0, "number of NVLinks"}},
		"NVML with C2C below 0": {head(`{"peerlaneCapture": 1, "nvml": {"gpus": [{"C2C": -1}]}}`), 1,
			&answerError{0, "failures or links to the CPU"}},
		"NVML with C2C without end": {head(`{"peerlaneCapture": 1, "nvml": {"gpus": [{"C2CBandwidth": 10000000000}]}}`), 1,
			&answerError{0, "failures or links to the CPU"}},
		"NVML with CPU links below 0": {head(`{"peerlaneCapture": 1, "nvml": {"gpus": [{"NVLinksCPU": -1}]}}`), 1,
			&answerError{0, "failures or links to the CPU"}},
		"NVML with a million GPUs": {head(`{"peerlaneCapture": 1, "nvml": {"gpus": [` + strings.Repeat("{},", 5000) +
			`{}]}}`), 1, &countError{items: "GPUs in NVML's answer", count: 5001, max: 1 << 12}},
		"a path from the root":        {member("/sys/a", ""), 2, errOutside},
		"a path above":                {member("sys/../../a", ""), 2, errOutside},
		"a path above at once":        {member("../sys/a", ""), 2, errOutside},
		"a path elsewhere":            {member("etc/passwd", ""), 2, errOutside},
		"a path that only begins so":  {member("system/a", ""), 2, errOutside},
		"a path with two slashes":     {member("sys//a", ""), 2, errOutside},
		"a second head":               {member(captureHead, headText), 2, errOutside},
		"a long path":                 {member("sys/"+deep+"a", ""), 2, errLongPath},
		"a long target":               {member("sys/a", "-> "+deep+"a"), 2, errLongPath},
		"a link to the root":          {member("sys/a", "-> /"), 2, &linkError{"/"}},
		"a link out":                  {member("sys/a", "-> ../../etc/passwd"), 2, &linkError{"../../etc/passwd"}},
		"a link far out":              {member("sys/b/a", "-> ../../../../etc"), 2, &linkError{"../../../../etc"}},
		"a link that goes down first": {member("sys/a", "-> b/../../../etc"), 2, &linkError{"b/../../../etc"}},
		"a hard link": {special(tar.Header{Name: "sys/a", Typeflag: tar.TypeLink, Linkname: "sys/b"}), 2,
			&typeError{'1'}},
		"a device": {special(tar.Header{Name: "sys/a", Typeflag: tar.TypeChar, Devmajor: 1, Devminor: 3}), 2,
			&typeError{'3'}},
		"a pipe": {special(tar.Header{Name: "sys/a", Typeflag: tar.TypeFifo}), 2, &typeError{'6'}},
		"a huge file": {special(tar.Header{Name: "sys/a", Typeflag: tar.TypeReg, Size: 1 << 40}), 2,
			&countError{items: "bytes", count: 1 << 40, max: maxCaptureFile}},
		"a file that is not there": {special(tar.Header{Name: "sys/a", Typeflag: tar.TypeReg, Size: 5}), 2,
			io.ErrUnexpectedEOF},
		"a file twice":                {two("sys/a", "1", "sys/a", "2"), 3, errTwice},
		"a file over a directory":     {two("sys/a/", "", "sys/a", "2"), 3, errTwice},
		"a directory over a file":     {two("sys/a", "1", "sys/a/", ""), 3, errTwice},
		"a file in a file":            {two("sys/a", "1", "sys/a/b", "2"), 3, errNotDirectory},
		"a file through a link":       {two("sys/a", "-> ../proc", "sys/a/b", "2"), 3, errNotDirectory},
		"a link that leads to itself": {two("sys/bus", "-> class", "sys/class", "-> bus"), 0, errNotHost},
		"no host":                     {member("sys/bus/pci/devices/x", "1"), 0, errNotHost},
	} {
		t.Run(name, func(t *testing.T) {
			h, err := hostOfCapture(bytes.NewReader(c.capture))
			member, _ := errors.AsType[*memberError](err)
			if h != nil || !testutil.HasError(err, c.want) || (member == nil) != (c.number == 0) ||
				member != nil && member.number != c.number {
				t.Errorf("%v, %v; want %v of member %d", h, err, c.want, c.number)
			}
		})
	}
}

func TestReadCaptureTornInputFails(t *testing.T) {
	whole := capture(t, topotest.Tree(t, variedHost()))
	for size := range whole {
		if h, err := hostOfCapture(bytes.NewReader(whole[:size])); err == nil {
			t.Fatalf("%d of %d bytes are read as %+v", size, len(whole), h)
		}
	}
	for at := 10; at < len(whole); at += 7 { // after the header of gzip, where bits can change without effect
		torn := slices.Clone(whole)
		torn[at] ^= 0x10
		if h, err := hostOfCapture(bytes.NewReader(torn)); err == nil {
			t.Fatalf("with a bit of byte %d turned it is read as %+v", at, h)
		}
	}
}

// endless is a member that does not end.
type endless struct{}

func (endless) Read(p []byte) (int, error) { clear(p); return len(p), nil }

func TestReadCaptureBombFailsAtLimit(t *testing.T) {
	// packed writes members until enough bytes are written or the test stops the writer.
	packed := func(write func(w *tar.Writer) error) io.Reader {
		r, w := io.Pipe()
		t.Cleanup(func() { _ = r.Close() }) // closing stops the writer
		go func() {
			z, _ := gzip.NewWriterLevel(w, gzip.BestSpeed)
			a := tar.NewWriter(z)
			err := a.WriteHeader(&tar.Header{Name: captureHead, Typeflag: tar.TypeReg, Size: int64(len(headText))})
			if err == nil {
				_, err = io.WriteString(a, headText)
			}
			if err == nil {
				err = write(a)
			}
			w.CloseWithError(errors.Join(err, a.Close(), z.Close()))
		}()
		return r
	}
	file := func(w *tar.Writer, name string, size int64) error {
		if err := w.WriteHeader(&tar.Header{Name: name, Typeflag: tar.TypeReg, Size: size}); err != nil {
			return err
		}
		_, err := io.CopyN(w, endless{}, size)
		return err
	}
	for name, c := range map[string]struct {
		bomb func(w *tar.Writer) error
		want error
	}{
		"content": {func(w *tar.Writer) (err error) {
			for i := 0; err == nil; i++ {
				err = file(w, fmt.Sprint("sys/", i), maxCaptureFile)
			}
			return err
		}, errTooMuch},
		"members": {func(w *tar.Writer) (err error) {
			for i := 0; err == nil; i++ {
				err = file(w, fmt.Sprint("sys/", i), 0)
			}
			return err
		}, errTooMuch},
		"directories": {func(w *tar.Writer) (err error) {
			for i := 0; err == nil; i++ {
				err = file(w, fmt.Sprintf("sys/%d/%sx", i, strings.Repeat("a/", 400)), 0)
			}
			return err
		}, errTooMuch},
		"a name said again and again": {func(w *tar.Writer) (err error) {
			for err == nil {
				err = w.WriteHeader(&tar.Header{Name: "sys/a/", Typeflag: tar.TypeDir})
			}
			return err
		}, errTooMuch},
		"a file of another kind": {func(w *tar.Writer) error {
			return file(w, "sys/a", 1<<40)
		}, &countError{items: "bytes", count: 1 << 40, max: maxCaptureFile}},
	} {
		t.Run(name, func(t *testing.T) {
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			_, err := hostOfCapture(packed(c.bomb))
			runtime.ReadMemStats(&after)
			if !testutil.HasError(err, c.want) {
				t.Errorf("%v; want %v", err, c.want)
			}
			// total allocation, including the allocation for packing
			if used := after.TotalAlloc - before.TotalAlloc; used > 800<<20 {
				t.Errorf("%d MiB were allocated", used>>20)
			}
		})
	}
	// Bytes after the end of the tar are read for the checksum of gzip.
	if n, err := io.Copy(io.Discard, &limited{r: endless{}, left: 1 << 20, what: "unpacked"}); n != 1<<20 ||
		!testutil.HasError(err, &streamError{"unpacked"}) {
		t.Errorf("of an endless reader %d bytes come, and %v", n, err)
	}
	// Noise does not compress. The noise follows the header of a file of permitted size.
	noise := io.MultiReader(bytes.NewReader([]byte{0x1f, 0x8b, 8, 0x10, 0, 0, 0, 0, 0, 255}), neverNull{})
	if _, err := hostOfCapture(noise); err == nil {
		t.Error("an endless comment of gzip is read")
	}
}

type neverNull struct{}

func (neverNull) Read(p []byte) (int, error) {
	for i := range p {
		p[i] = 'x'
	}
	return len(p), nil
}

func TestHeldFilesBehaveAsFilesOnDisk(t *testing.T) {
	o := topotest.Tree(t, variedHost())
	root := filepath.Dir(o.Sysfs)
	for name, target := range map[string]string{"loop": "loop", "up": "../../..", "nowhere": "a/b",
		"file": "../proc/cpuinfo", "dir": "../sys/class", "here": "."} {
		if err := os.Symlink(target, filepath.Join(o.Sysfs, name)); err != nil {
			t.Fatal(err)
		}
	}
	p := unpacking{held: held{"/": {names: map[string]bool{}}}}
	var paths []string
	err := filepath.WalkDir(root, func(at string, d fs.DirEntry, err error) error {
		if err != nil || at == root {
			return err
		}
		name := strings.TrimPrefix(at, root)
		paths = append(paths, name)
		var e heldFile
		switch d.Type() {
		case fs.ModeDir:
			e.names = map[string]bool{}
		case fs.ModeSymlink:
			e.target, err = os.Readlink(at)
		default:
			e.data, err = os.ReadFile(at)
		}
		if err != nil {
			return err
		}
		return p.hold(name, e)
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range slices.Clone(paths) {
		paths = append(paths, name+"/absent", name+"/device", name+"/../up/sys")
	}
	for _, link := range []string{"dir/infiniband/mlx5_0", "dir/../devices", "file/x", "here/here/class", "nowhere/c"} {
		paths = append(paths, "/sys/"+link)
	}
	// Paths in errors lose the root, and errors are compared by kind.
	errorText := func(v any, err error) string {
		var pe *fs.PathError
		if errors.As(err, &pe) {
			err = pe.Err
		}
		return strings.ReplaceAll(fmt.Sprint(v, " ", err), root, "")
	}
	names := func(entries []fs.DirEntry, err error) string {
		var all []string
		for _, e := range entries {
			all = append(all, e.Name()+" "+e.Type().String())
		}
		return errorText(all, err)
	}
	asked := 0
	for _, name := range paths {
		name = filepath.Clean(name)
		if strings.HasPrefix(name, "/sys/loop") || strings.HasPrefix(name, "/sys/up") {
			continue // os reports loops with another error, and up leads above the root of the test
		}
		asked++
		text, err := machine{}.ReadFile(root + name)
		got, gotErr := p.held.ReadFile(name)
		if want, got := errorText(string(text), err), errorText(string(got), gotErr); want != got {
			t.Errorf("reading %s: on disk %s, in memory %s", name, want, got)
		}
		if want, got := errorText(machine{}.ReadLink(root+name)), errorText(p.held.ReadLink(name)); want != got {
			t.Errorf("reading the link %s: on disk %s, in memory %s", name, want, got)
		}
		if want, got := errorText(machine{}.Resolve(root+name)), errorText(p.held.Resolve(name)); want != got {
			t.Errorf("resolving %s: on disk %s, in memory %s", name, want, got)
		}
		if want, got := names(machine{}.ReadDir(root+name)), names(p.held.ReadDir(name)); want != got {
			t.Errorf("listing %s: on disk %s, in memory %s", name, want, got)
		}
	}
	if asked < 100 {
		t.Errorf("only %d paths were asked for", asked)
	}
	if _, err := p.held.ReadFile("/sys/loop"); err == nil || errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a link to itself: %v", err)
	}
	if at, err := p.held.Resolve("/sys/up/sys/class"); at != "/sys/class" || err != nil {
		t.Errorf("above the root: %s, %v; want the root, as in a file system", at, err)
	}
}

func FuzzReadCapture(f *testing.F) {
	f.Add(capture(f, topo.Options{Sysfs: f.TempDir(), Proc: f.TempDir()}))
	f.Add(pack(f, []string{captureHead, "sys/bus/pci/devices/0000:01:00.0"}, headText,
		"-> ../../../devices/pci0000:00/0000:01:00.0"))
	f.Fuzz(func(t *testing.T, data []byte) {
		h, err := hostOfCapture(bytes.NewReader(data))
		if (h == nil) == (err == nil) {
			t.Errorf("%v, %v", h, err)
		}
	})
}

// FuzzReadCaptureTar gets past gzip's sum, which random bytes do not.
func FuzzReadCaptureTar(f *testing.F) {
	unpacked := func(data []byte) []byte {
		z, err := gzip.NewReader(bytes.NewReader(data))
		if err != nil {
			f.Fatal(err)
		}
		tar, err := io.ReadAll(z)
		if err != nil {
			f.Fatal(err)
		}
		return tar
	}
	f.Add(unpacked(pack(f, []string{captureHead, "sys/bus/pci/devices/0000:00:01.0",
		"sys/devices/pci0000:00/0000:00:01.0/class", "sys/devices/pci0000:00/0000:00:01.0/vendor"},
		headText, "-> ../../../devices/pci0000:00/0000:00:01.0", "0x030200\n", "0x10de\n")))
	f.Add(unpacked(pack(f, []string{captureHead, "sys/class/infiniband/a", "sys/class/infiniband/b/",
		"sys/class/infiniband/b/device"}, headText, "-> b", "", "-> ../a/device")))
	f.Fuzz(func(t *testing.T, data []byte) {
		h, err := hostOfCapture(bytes.NewReader(compress(t, data)))
		if (h == nil) == (err == nil) {
			t.Errorf("%v, %v", h, err)
		}
	})
}

func FuzzWithoutSerials(f *testing.F) {
	f.Add([]byte{})
	f.Add(bytes.Repeat([]byte{0x40}, 4096))
	f.Fuzz(func(t *testing.T, config []byte) {
		if len(config) > 4096 {
			return
		}
		kept := withoutSerials(config)
		if len(kept) != len(config) {
			t.Fatalf("%d bytes become %d", len(config), len(kept))
		}
		for i := range kept {
			if kept[i] != 0 && kept[i] != config[i] {
				t.Fatalf("byte %#x changes from %#x to %#x", i, config[i], kept[i])
			}
		}
	})
}
