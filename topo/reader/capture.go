package reader

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"path"
	"slices"
	"strings"

	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/internal/lazyregexp"
)

// sourceCapture is the Source.Kind of a host that was read from a capture.
const sourceCapture = "capture"

const (
	// captureFormat is the version of the format of captures. hostOfCapture refuses other versions.
	captureFormat = 1
	// captureHead is the first member of a capture.
	captureHead = "peerlane-capture.json"
)

// captureHeader holds the data of a capture that is not a file of sysfs or procfs.
type captureHeader struct {
	Format int           `json:"peerlaneCapture"`
	NVML   *capturedNVML `json:"nvml,omitempty"` // nil if Capture did not query NVML
}

// capturedNVML holds the answer of NVML. capturedNVML implements NVML.
type capturedNVML struct {
	Answer []topo.NVMLGPU `json:"gpus,omitempty"`
	// Error is the text of NVML's error. Absent reports that the error is ErrNoNVML.
	Error  string `json:"error,omitempty"`
	Absent bool   `json:"absent,omitempty"`
}

func (n *capturedNVML) GPUs() ([]topo.NVMLGPU, error) {
	if n.Error == "" {
		return n.Answer, nil
	}
	return n.Answer, &capturedError{n.Error, n.Absent}
}

// capturedError is an error of the captured host.
type capturedError struct {
	text   string
	absent bool
}

func (e *capturedError) Error() string        { return e.text }
func (e *capturedError) Is(target error) bool { return e.absent && target == topo.ErrNoNVML }

// Capture writes the input of a host to w, as a file that ReadCapture reads on any machine: a tar,
// compressed by gzip, of the attributes in sysfs and procfs that describe PCI functions, RDMA
// devices, NUMA nodes and processors, and of the answer of NVML.
//
// A capture has no serial number, no vital product data, no host name and no address of a network
// interface. Of a configuration space, a capture has the header and the capabilities of PCI
// Express, ACS and SR-IOV. The kernel shows capabilities to root only, so captures of unprivileged
// users lack capabilities. A capture has the UUIDs of GPUs, because plans name GPUs by UUID, and
// the GUIDs of RDMA devices, because ports of a device share the GUID.
func Capture(o topo.Options, w io.Writer) error {
	compressed, err := gzip.NewWriterLevel(w, gzip.BestCompression)
	if err != nil {
		return fmt.Errorf("capture this host: %w", err)
	}
	c := &capturing{tar: tar.NewWriter(compressed), written: map[string]bool{}}
	if err := c.header(o.NVML); err != nil {
		return fmt.Errorf("capture this host: %w", err)
	}
	sysfs, proc := o.Roots()
	if err := Record(sysfs, proc, everything, c); err != nil {
		return err
	}
	if err := errors.Join(c.tar.Close(), compressed.Close()); err != nil {
		return fmt.Errorf("capture this host: %w", err)
	}
	return nil
}

// capturing is the Recorder that writes a capture.
type capturing struct {
	tar     *tar.Writer
	written map[string]bool
}

func (c *capturing) header(nvml topo.NVML) error {
	h := captureHeader{Format: captureFormat}
	if nvml != nil {
		answer, err := nvml.GPUs()
		h.NVML = &capturedNVML{Answer: answer}
		if err != nil {
			h.NVML.Error, h.NVML.Absent = err.Error(), errors.Is(err, topo.ErrNoNVML)
		}
	}
	text, err := json.MarshalIndent(h, "", "  ")
	if err != nil {
		return err
	}
	return c.add(tar.Header{Typeflag: tar.TypeReg, Name: captureHead, Mode: 0o644}, append(text, '\n'))
}

// add writes a member without time and owner, so that equal hosts have equal captures.
func (c *capturing) add(h tar.Header, data []byte) error {
	if c.written[h.Name] {
		return nil
	}
	c.written[h.Name] = true
	h.Size = int64(len(data))
	if err := c.tar.WriteHeader(&h); err != nil {
		return err
	}
	_, err := c.tar.Write(data)
	return err
}

func (c *capturing) Directory(p string) error {
	return c.add(tar.Header{Typeflag: tar.TypeDir, Name: p + "/", Mode: 0o755}, nil)
}

func (c *capturing) Link(p, target string) error {
	return c.add(tar.Header{Typeflag: tar.TypeSymlink, Name: p, Linkname: target, Mode: 0o777}, nil)
}

func (c *capturing) File(p string, data []byte) error {
	switch path.Base(p) {
	case "config":
		data = withoutSerials(data)
	case "version":
		data = driverBuilder.ReplaceAll(data, nil)
	case "information":
		data = knownLines(data)
	}
	return c.add(tar.Header{Typeflag: tar.TypeReg, Name: p, Mode: 0o644}, data)
}

// driverBuilder matches the user and the host that built the driver in
// /proc/driver/nvidia/version: "Release Build  (root@node17)".
var driverBuilder = lazyregexp.New(` *\([^()\s]*@[^()]*\)`)

// knownLines keeps the lines of /proc/driver/nvidia/gpus/*/information that are known to have no
// serial number and no name.
func knownLines(data []byte) []byte {
	known := []string{"Model", "GPU UUID", "Video BIOS", "Bus Type", "Bus Location", "Device Minor", "GPU Firmware",
		"GPU Excluded"}
	var kept []byte
	for line := range bytes.Lines(data) {
		key, _, _ := bytes.Cut(line, []byte(":"))
		if slices.Contains(known, string(bytes.TrimSpace(key))) {
			kept = append(kept, line...)
		}
	}
	return kept
}

// Limits of a capture. A host with 4,096 functions stays below every limit.
const (
	maxCapture        = 16 << 20  // bytes, compressed
	maxCaptureTar     = 128 << 20 // bytes of the tar
	maxCaptureMembers = 1 << 17   // files, links and directories
	maxCaptureContent = 48 << 20  // bytes of content, targets and paths
	maxCaptureFile    = 1 << 20   // bytes
	maxCapturePath    = 1 << 10   // bytes
)

// hostOfCapture reads a host from the output of Capture, by the rules of Sysfs. hostOfCapture keeps
// the capture in memory, writes no file and trusts no input: links stay inside the capture, and
// limits bound memory and time.
func hostOfCapture(r io.Reader) (*topo.Host, error) {
	h, err := readCapture(r)
	if err != nil {
		return nil, fmt.Errorf("%w; `peerlane topo capture` makes a capture", err)
	}
	return h, nil
}

func readCapture(r io.Reader) (*topo.Host, error) {
	input := &limited{r: r, left: maxCapture, what: "compressed"}
	uncompressed, err := gzip.NewReader(input)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errNotGzip, err)
	}
	stream := &limited{r: uncompressed, left: maxCaptureTar, what: "unpacked"}
	p := unpacking{tar: tar.NewReader(stream), held: held{"/": {names: map[string]bool{}}}}
	header, err := p.header()
	if err != nil {
		return nil, err
	}
	if err := p.members(); err != nil {
		return nil, err
	}
	// gzip detects a truncated file by the checksum after the last member.
	if _, err := io.Copy(io.Discard, stream); err != nil {
		return nil, fmt.Errorf("after its last member: %w", err)
	}
	o := topo.Options{Sysfs: "/sys", Proc: "/proc"}
	if header.NVML != nil {
		o.NVML = header.NVML
	}
	h, err := readHost(o, p.held)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errNotHost, err)
	}
	h.Source = topo.Source{Kind: sourceCapture}
	return h, nil
}

// limited reads at most left bytes.
type limited struct {
	r    io.Reader
	left int64
	what string
}

func (l *limited) Read(p []byte) (int, error) {
	if l.left <= 0 {
		return 0, &streamError{l.what}
	}
	n, err := l.r.Read(p[:min(int64(len(p)), l.left)])
	l.left -= int64(n)
	return n, err
}

// unpacking reads the members of a capture.
type unpacking struct {
	tar     *tar.Reader
	held    held
	number  int // of the member
	content int // bytes held so far
}

// header reads the first member.
func (p *unpacking) header() (captureHeader, error) {
	p.number = 1
	member, err := p.tar.Next()
	if err == nil && (member.Name != captureHead || member.Typeflag != tar.TypeReg) {
		err = &otherTarError{member.Name}
	}
	var data []byte
	if err == nil {
		data, err = p.data(member)
	}
	var h captureHeader
	if err == nil {
		err = json.Unmarshal(data, &h)
	}
	if err == nil && h.Format != captureFormat {
		err = &formatError{h.Format}
	}
	if err == nil && h.NVML != nil {
		err = h.NVML.check()
	}
	if err != nil {
		return h, &memberError{number: 1, err: err}
	}
	return h, nil
}

// check returns an error for values that NVML cannot return.
func (n *capturedNVML) check() error {
	const limit = 1 << 12 // GPUs, and links of a GPU
	if len(n.Answer) > limit {
		return &countError{items: "GPUs in NVML's answer", count: len(n.Answer), max: limit}
	}
	for i, g := range n.Answer {
		links := g.NVLinksCPU
		if len(g.Failures) > limit || g.NVLinksCPU < 0 || g.C2C < 0 || g.C2C > limit || g.C2CBandwidth < 0 ||
			g.C2CBandwidth > 1<<30 {
			return &answerError{i, "failures or links to the CPU"}
		}
		for _, count := range g.NVLinks {
			if links += count; count < 0 || links > limit {
				return &answerError{i, "number of NVLinks"}
			}
		}
		if g.Index < 0 || g.Index >= limit || g.Minor < -1 || g.Minor >= 1<<20 || g.Capability < 0 || g.Capability > 10000 {
			return &answerError{i, fmt.Sprintf("index %d, minor %d or capability %d", g.Index, g.Minor, g.Capability)}
		}
	}
	return nil
}

func (p *unpacking) data(m *tar.Header) ([]byte, error) {
	if m.Size > maxCaptureFile {
		return nil, &countError{items: "bytes", count: int(m.Size), max: maxCaptureFile}
	}
	data := make([]byte, m.Size)
	_, err := io.ReadFull(p.tar, data)
	return data, err
}

func (p *unpacking) members() error {
	for {
		member, err := p.tar.Next()
		if err == io.EOF {
			return nil
		}
		p.number++
		if err != nil {
			return &memberError{number: p.number, err: err}
		}
		if err = p.member(member); err == nil && p.number > maxCaptureMembers {
			err = errTooMuch // a tar can repeat a directory
		}
		if err != nil {
			return &memberError{p.number, member.Name, err}
		}
	}
}

func (p *unpacking) member(m *tar.Header) error {
	name := strings.TrimSuffix(m.Name, "/")
	if len(m.Name) > maxCapturePath || len(m.Linkname) > maxCapturePath {
		return errLongPath
	}
	if name != path.Clean(name) || name != "sys" && name != "proc" && !strings.HasPrefix(name, "sys/") &&
		!strings.HasPrefix(name, "proc/") || strings.ContainsRune(name, 0) {
		return errOutside
	}
	e := heldFile{}
	var err error
	switch m.Typeflag {
	case tar.TypeDir:
		e.names = map[string]bool{}
	case tar.TypeReg:
		if e.data, err = p.data(m); err != nil {
			return err
		}
	case tar.TypeSymlink:
		if e.target = m.Linkname; path.IsAbs(e.target) || path.Clean(e.target) != e.target ||
			escapes("/"+path.Dir(name), e.target) {
			return &linkError{e.target}
		}
	default:
		return &typeError{m.Typeflag}
	}
	if p.content += len(e.data) + len(e.target); p.content > maxCaptureContent {
		return errTooMuch
	}
	return p.hold("/"+name, e)
}

// escapes reports whether a relative target leads from dir above the root.
func escapes(dir, target string) bool {
	depth := strings.Count(strings.TrimSuffix(dir, "/"), "/")
	for element := range strings.SplitSeq(target, "/") {
		if element != ".." {
			return false // path.Clean moves every .. to the front
		}
		if depth--; depth < 0 {
			return true
		}
	}
	return false
}

// hold adds an entry, and the directories above.
func (p *unpacking) hold(at string, e heldFile) error {
	if old, ok := p.held[at]; ok {
		if old.names != nil && e.names != nil {
			return nil // the directory follows a file of the directory
		}
		return errTwice
	}
	if dir := path.Dir(at); dir != at {
		above, ok := p.held[dir]
		if !ok {
			if err := p.hold(dir, heldFile{names: map[string]bool{}}); err != nil {
				return err
			}
			above = p.held[dir]
		}
		if above.names == nil {
			return fmt.Errorf("%s %w", dir, errNotDirectory)
		}
		above.names[path.Base(at)] = true
	}
	if p.content += len(at); p.content > maxCaptureContent || len(p.held) >= maxCaptureMembers {
		return errTooMuch
	}
	p.held[at] = e
	return nil
}
