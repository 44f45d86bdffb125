package launch

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
	"unicode"
)

// A pair of GPUs is tested before a lane stages on it: `peerlane-relay self-test`, a process
// without clients, reads a PairJob from standard input and writes a PairHost and then a Pair per
// pair to standard output, a JSON document per line. The starter of the process stores the pairs
// that ReadPairs accepts, and sends the pairs to relays in Config.Pairs.

// Verdicts on a pair.
const (
	VerdictGood     = "good"
	VerdictWrong    = "wrong"    // bytes arrived wrong, or a copy failed
	VerdictSlow     = "slow"     // slower than the bounce through the host's memory
	VerdictUntested = "untested" // the test could not be made; nothing is known
)

// Use of untested pairs by lanes.
const (
	SelfTestOff      = "off"      // nothing is tested, every pair is used
	SelfTestOnce     = "once"     // a pair is tested once a boot; one that could not be is used
	SelfTestRequired = "required" // only a pair that has passed is used
)

// PairName is a client's GPU and a server GPU of the lane.
type PairName struct {
	GPU    GPU `json:"gpu"`
	Server GPU `json:"server"`
}

func (n PairName) String() string {
	return fmt.Sprintf("GPU %d (%s) and GPU %d (%s)", n.GPU.Index, n.GPU.BusID, n.Server.Index, n.Server.BusID)
}

// same reports whether two names mean the same devices, by the known parts of both.
func (n PairName) same(o PairName) bool { return sameGPU(n.GPU, o.GPU) && sameGPU(n.Server, o.Server) }

func sameGPU(a, b GPU) bool {
	return a.BusID == b.BusID && (a.UUID == b.UUID || a.UUID == "" || b.UUID == "")
}

// PairJob is the job of a self-test.
type PairJob struct {
	Pairs []PairName `json:"pairs"`
	// SlotBytes is the largest chunk that the calibration tries, bytes.
	SlotBytes uint64 `json:"slotBytes"`
}

// PairHost is the host of a self-test.
type PairHost struct {
	// Driver is the CUDA version of the driver, 1000 × major + 10 × minor.
	Driver int `json:"driver"`
	// Simulated says that it is package cuda/sim: the rates do not apply to GPUs.
	Simulated bool `json:"simulated"`
}

// Pair is the result of a self-test for a pair.
type Pair struct {
	PairName
	Verdict string `json:"verdict"`
	Reason  string `json:"reason,omitempty"` // unless it is good
	// Bytes were copied and compared.
	Bytes uint64 `json:"bytes"`
	// Reader reports whether a running kernel read the copied bytes: "passed", or why it was not
	// tried.
	Reader string `json:"reader,omitempty"`
	// Push is the rate from the client's GPU, Pull the rate into the GPU.
	Push PairRate `json:"push"`
	Pull PairRate `json:"pull"`
	// Choices of the calibration: the size of a piece in bytes, the number of pieces in flight, and
	// the number of streams. 0 where it chose nothing.
	Chunk   uint64 `json:"chunk,omitempty"`
	Depth   int    `json:"depth,omitempty"`
	Streams int    `json:"streams,omitempty"`
	// Milliseconds is the duration, and At the time, in Unix seconds.
	Milliseconds int64 `json:"milliseconds"`
	At           int64 `json:"at"`
}

// PairRate is how fast copies are, GB/s of 1e9 bytes; 0 where it was not measured.
type PairRate struct {
	Client float64 `json:"client"` // issued by the client's GPU, as relays do
	Server float64 `json:"server"` // issued by the server's, which takes a second context
	Bounce float64 `json:"bounce"` // between the client's GPU and pinned host memory
}

// Usable reports whether staging may be on the pair, where that has to be known (SelfTestRequired)
// or not. A nil pair is unknown.
func (p *Pair) Usable(required bool) bool {
	switch {
	case p == nil, p.Verdict == VerdictUntested:
		return !required
	}
	return p.Verdict == VerdictGood
}

// Age is how long ago the test was.
func (p *Pair) Age() time.Duration { return time.Since(time.Unix(p.At, 0)) }

// Bounds of the values that a self-test, or the configuration, can choose.
const (
	MaxStreams = 8
	MaxDepth   = 64
)

// Bounds of a result.
const (
	maxPairs    = 4096
	maxReason   = 512
	maxPairLine = 8 << 10
	maxGBs      = 1e6
)

// Compiled at their first use: every command has this package, and few check pairs.
var (
	busIDForm = sync.OnceValue(
		func() *regexp.Regexp { return regexp.MustCompile(`^[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]$`) },
	)
	uuidForm = sync.OnceValue(func() *regexp.Regexp {
		return regexp.MustCompile(`^((GPU|MIG)-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12})?$`)
	})
)

// Check returns an error if no self-test can have found the pair.
func (p Pair) Check() error {
	for _, g := range []GPU{p.GPU, p.Server} {
		switch {
		case !busIDForm().MatchString(g.BusID):
			return &ValueError{"PCI address", g.BusID, ""}
		case !uuidForm().MatchString(g.UUID):
			return &ValueError{"UUID", g.UUID, ""}
		case g.Index < 0 || g.Index > 1<<16:
			return &ValueError{"GPU", g.Index, ""}
		}
	}
	if err := p.checkVerdict(); err != nil {
		return err
	}
	return p.checkNumbers()
}

func (p Pair) checkVerdict() error {
	if !slices.Contains([]string{VerdictGood, VerdictWrong, VerdictSlow, VerdictUntested}, p.Verdict) {
		return &ValueError{"verdict", p.Verdict, ""}
	}
	for _, text := range []string{p.Reason, p.Reader} {
		if len(text) > maxReason || strings.ContainsFunc(text, unicode.IsControl) {
			return &ValueError{"reason or reader", text, textForm}
		}
	}
	if (p.Reason == "") != (p.Verdict == VerdictGood) {
		return &ValueError{"reason of verdict " + p.Verdict, p.Reason, ""}
	}
	return nil
}

func (p Pair) checkNumbers() error {
	for _, r := range []PairRate{p.Push, p.Pull} {
		for _, gbs := range []float64{r.Client, r.Server, r.Bounce} {
			if math.IsNaN(gbs) || gbs < 0 || gbs > maxGBs {
				return &ValueError{"rate in GB/s", gbs, ""}
			}
		}
	}
	if p.Chunk != 0 && (p.Chunk < 64<<10 || p.Chunk > 1<<30 || p.Chunk%(64<<10) != 0) {
		return &ValueError{"chunk", p.Chunk, "a multiple of 64 KiB up to 1 GiB"}
	}
	if p.Depth < 0 || p.Depth > MaxDepth {
		return &ValueError{"depth", p.Depth, fmt.Sprintf("0 to %d", MaxDepth)}
	}
	if p.Streams < 0 || p.Streams > MaxStreams {
		return &ValueError{"streams", p.Streams, fmt.Sprintf("0 to %d", MaxStreams)}
	}
	if p.Bytes > 1<<50 || p.Milliseconds < 0 || p.Milliseconds > 1<<40 || p.At < 0 || p.At > 1<<40 {
		return errors.New("numbers beyond all bounds")
	}
	return nil
}

// strictly reads a JSON document and refuses keys that value does not have.
func strictly(text []byte, value any) error {
	d := json.NewDecoder(bytes.NewReader(text))
	d.DisallowUnknownFields()
	if err := d.Decode(value); err != nil {
		return decodeError(err)
	}
	if _, err := d.Token(); err != io.EOF {
		return errMore
	}
	return nil
}

// ReadPairs reads the output of a self-test to the end, and calls a function per pair. It refuses
// unrequested, repeated and impossible results; pairs before an error are valid.
func ReadPairs(r io.Reader, asked []PairName, each func(PairHost, Pair)) error {
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, maxPairLine)
	var host PairHost
	waited := slices.Clone(asked)
	for n := 0; lines.Scan(); n++ {
		if n == 0 {
			if err := strictly(lines.Bytes(), &host); err != nil {
				return &lineError{"the self-test", 1, err}
			}
			if host.Driver < 0 || host.Driver > 1<<30 {
				return &lineError{"the self-test", 1, &ValueError{"driver", host.Driver, ""}}
			}
			continue
		}
		var p Pair
		err := strictly(lines.Bytes(), &p)
		if err == nil {
			err = p.Check()
		}
		if err != nil {
			return &lineError{"the self-test", n + 1, err}
		}
		i := slices.IndexFunc(waited, p.same)
		if i < 0 {
			return &lineError{"the self-test", n + 1, fmt.Errorf("%v: %w", p.PairName, errNotAsked)}
		}
		p.GPU.Index, p.Server.Index = waited[i].GPU.Index, waited[i].Server.Index // by the plan
		waited = slices.Delete(waited, i, i+1)
		each(host, p)
	}
	if err := lines.Err(); err != nil {
		return fmt.Errorf("reading the self-test: %w", err)
	}
	return nil
}

// PairRecord stores the results of self-tests: of a boot and a driver version.
type PairRecord struct {
	Version int    `json:"version"`
	Boot    string `json:"boot"`    // /proc/sys/kernel/random/boot_id
	Module  string `json:"module"`  // the driver's, /sys/module/nvidia/version; empty where there is none
	Library string `json:"library"` // in place of libcuda.so.1; mostly empty
	PairHost
	Pairs []Pair `json:"pairs"`
	// Triples are results of GPUs with NICs.
	Triples []Triple `json:"triples,omitempty"`
}

// PairVersion is that of the PairRecords that this release reads and writes.
const PairVersion = 1

// MaxPairRecord bounds a record, bytes.
const MaxPairRecord = 4 << 20

// ReadPairRecord reads a record. It refuses records that this release cannot have written.
func ReadPairRecord(text []byte) (PairRecord, error) {
	var r PairRecord
	if len(text) > MaxPairRecord {
		return r, &ValueError{"bytes of the record", len(text), fmt.Sprintf("up to %d", MaxPairRecord)}
	}
	if err := strictly(text, &r); err != nil {
		return PairRecord{}, err
	}
	if r.Version != PairVersion {
		return PairRecord{}, &ValueError{"version", r.Version, strconv.Itoa(PairVersion)}
	}
	if len(r.Pairs) > maxPairs {
		return PairRecord{}, &ValueError{"number of pairs", len(r.Pairs), fmt.Sprintf("up to %d", maxPairs)}
	}
	for i, p := range r.Pairs {
		if err := p.Check(); err != nil {
			return PairRecord{}, fmt.Errorf("pair %d: %w", i, err)
		}
		if slices.ContainsFunc(r.Pairs[:i], func(o Pair) bool { return o.same(p.PairName) }) {
			return PairRecord{}, fmt.Errorf("%v: %w", p.PairName, errTwice)
		}
	}
	if len(r.Triples) > maxPairs {
		return PairRecord{}, &ValueError{"number of triples", len(r.Triples), fmt.Sprintf("up to %d", maxPairs)}
	}
	for i, t := range r.Triples {
		if err := t.Check(); err != nil {
			return PairRecord{}, fmt.Errorf("triple %d: %w", i, err)
		}
		if FindTriple(r.Triples[:i], t.TripleName) != nil {
			return PairRecord{}, fmt.Errorf("%v: %w", t.TripleName, errTwice)
		}
	}
	return r, nil
}

// FindPair returns the entry of a pair in a list, or nil.
func FindPair(list []Pair, name PairName) *Pair {
	if i := slices.IndexFunc(list, func(p Pair) bool { return p.same(name) }); i >= 0 {
		return &list[i]
	}
	return nil
}

// StagingPairs returns the pairs of lanes' staging: servers first, then spares.
func StagingPairs(lanes []Lane) []PairName {
	var list []PairName
	add := func(n PairName) {
		if n.GPU.BusID != n.Server.BusID && !slices.ContainsFunc(list, n.same) {
			list = append(list, n)
		}
	}
	for _, l := range lanes {
		if !l.Relay {
			continue
		}
		for _, server := range l.Servers {
			add(PairName{l.GPU, server})
		}
	}
	for _, l := range lanes {
		if !l.Relay {
			continue
		}
		for _, spare := range l.Spares {
			add(PairName{l.GPU, spare.GPU})
		}
	}
	return list
}
