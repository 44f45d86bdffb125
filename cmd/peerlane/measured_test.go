package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sirupsen/logrus"

	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/hook/selftest"
	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/reader"
)

func TestMeasuredPairsAreRatesOfCopiesAndMemory(t *testing.T) {
	fit, wrong := testedPair(0, launch.VerdictGood, ""), testedPair(1, launch.VerdictWrong, "x")
	slower := testedPair(4, launch.VerdictSlow, "x")
	slower.Push.Bounce, slower.Pull.Bounce = 60, 1
	slower.Server.BusID = "0000:19:00.0"
	m := selftest.MeasuredPairs([]launch.Pair{wrong, fit, slower, testedPair(3, launch.VerdictUntested, "x")})
	if len(m.Copies) != 2 || m.Copies[0] != (topo.MeasuredCopy{GPU: "0000:17:00.0", Peer: "0000:18:00.0", Out: 395.04,
		In: 394}) {
		t.Errorf("copies are %+v", m.Copies)
	}
	if len(m.Memory) != 1 || m.Memory[0] != (topo.MeasuredHost{GPU: "0000:17:00.0", Out: 60, In: 54}) {
		t.Errorf("host memory is %+v", m.Memory)
	}
}

// Self-tests add to the rates of `peerlane plan --measure`: the start of a container adds missing
// rates, and `peerlane self-test` replaces the rates of the same GPUs.
func TestSelfTestsFeedTheMeasuredRates(t *testing.T) {
	_, host := recordedHost(t)
	read := func() *topo.Host {
		h, err := reader.Sysfs(topo.Options{Sysfs: host[1], Proc: host[3]})
		if err != nil {
			t.Fatal(err)
		}
		return h
	}
	a := &app{layout: paths.New(t.TempDir()), log: logrus.New()}
	first, again, other := testedPair(0, launch.VerdictGood, ""), testedPair(0, launch.VerdictGood, ""),
		testedPair(1, launch.VerdictGood, "")
	again.Push.Client, other.Server.BusID = 200, "0000:19:00.0"
	h := read()
	if !addPairs(h, []launch.Pair{first}) || len(h.Measured.Copies) != 1 || len(h.Measured.Memory) != 1 {
		t.Fatalf("the rates of a first self-test are %+v", h.Measured)
	}
	a.keepKnownPairs(&planned{host: h, learned: true})
	h = read()
	a.useMeasured(h)
	if addPairs(h, []launch.Pair{again}) || h.Measured.Copies[0].Out != 395.04 {
		t.Errorf("a self-test at the start of a container replaces stored rates: %+v", h.Measured)
	}
	if err := a.keepPairs(read(), []launch.Pair{again, other}); err != nil {
		t.Fatal(err)
	}
	h = read()
	a.useMeasured(h)
	if m := h.Measured; m == nil || len(m.Copies) != 2 || m.Copies[0].Out != 200 || m.Copies[1].Peer != "0000:19:00.0" ||
		m.At == 0 {
		t.Errorf("after peerlane self-test the rates are %+v", m)
	}
	a.keepKnownPairs(&planned{host: read()}) // without new rates
	if h := read(); func() bool { a.useMeasured(h); return h.Measured == nil }() {
		t.Error("a plan without new self-tests removes the rates")
	}
}

func TestPlanFollowsMeasurementOfHost(t *testing.T) {
	_, host := recordedHost(t)
	root := t.TempDir()
	a := &app{layout: paths.New(root), log: logrus.New()}
	h, err := reader.Sysfs(topo.Options{Sysfs: host[1], Proc: host[3]})
	if err != nil {
		t.Fatal(err)
	}
	estimate := func() string {
		return peerlane(t, append([]string{"plan", "--estimate", "--root", root}, host...)...)
	}
	before := estimate()
	if strings.Contains(before, "measured") && !strings.Contains(before, "plan --measure") {
		t.Errorf("estimate without a measurement:\n%s", before)
	}
	m := &topo.Measured{Fingerprint: h.Fingerprint(), At: 1}
	for _, g := range h.GPUs {
		m.Memory = append(m.Memory, topo.MeasuredHost{GPU: g.BusID, Out: 44, In: 41.5})
	}
	if err := a.keepMeasured(m); err != nil {
		t.Fatal(err)
	}
	after := estimate()
	for _, want := range []string{"Links that neither PCIe nor NVLink tells", "host memory of NUMA node 0", "41.5",
		"measured"} {
		if !strings.Contains(after, want) {
			t.Errorf("no %q in\n%s", want, after)
		}
	}
	if strings.Contains(after, "try peerlane plan --measure") {
		t.Error("a host that was measured is to be measured")
	}
	info, err := os.Stat(a.measuredFile())
	if err != nil || info.Mode().Perm() != 0o644 {
		t.Errorf("the file is %v, %v", info, err)
	}
	m.Fingerprint = "another host"
	if err := a.keepMeasured(m); err != nil {
		t.Fatal(err)
	}
	if estimate() != before {
		t.Error("the rates of another host change the estimate")
	}
	if err := os.WriteFile(filepath.Join(root, "var/lib/peerlane/measured.json"), []byte("{torn"), 0o644); err != nil {
		t.Fatal(err)
	}
	if estimate() != before {
		t.Error("a torn file changes the estimate")
	}
}

func TestMeasureIsOfThisHostAlone(t *testing.T) {
	_, host := recordedHost(t)
	var out, errOut strings.Builder
	if code := run(append([]string{"plan", "--measure"}, host...), &out, &errOut); code != exitUsage ||
		!strings.Contains(errOut.String(), "--measure tests this machine's GPUs") {
		t.Errorf("exit status %d: %s", code, errOut.String())
	}
}
