package doctor

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/hook/control"
	"github.com/peerlane/peerlane/hook/generation"
	"github.com/peerlane/peerlane/hook/staging"
	"github.com/peerlane/peerlane/internal/testutil"
	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/topo"
)

// doctor reports a source that is unreadable for this user, or that does not answer, and does not
// count it as a failure.
func TestDoctorUnreadableSourceIsNoFault(t *testing.T) {
	m := newMade(t)
	for _, test := range []struct {
		name  string
		blind func()
		want  []string
	}{
		{"no kernel log", func() { m.remove("dev/kmsg") }, []string{"xid", "selinux", "apparmor"}},
		{"no NVML", func() {
			m.fake.err = topo.ErrNoNVML
			m.fake.health.GPUs, m.fake.gpus = nil, nil
		}, []string{"driver", "p2p", "bar1", "mig", "vgpu", "compute-mode", "persistence-mode", "staging"}},
		{"the state of relays", func() {
			m.generateErr = &fs.PathError{Op: "open", Path: "/var/lib/peerlane",
				Err: fs.ErrPermission}
		},
			[]string{"memlock-init", "relays", "leftovers", "nccl"}},
		{"a limit without a number", func() { m.write("proc/700/limits", "Max locked memory") }, []string{"memlock-exec"}},
		{"nonsense for a subnet manager", func() {
			m.write(ib0+"/ports/1/link_layer", "InfiniBand")
			m.write(ib1+"/ports/1/link_layer", "InfiniBand")
			m.write(ib0+"/ports/1/sm_lid", "many")
			m.write(ib1+"/ports/1/sm_lid", "0x1")
		}, []string{"subnet-manager"}},
		{"no counters", func() {
			for _, c := range badCounters {
				m.remove(ib0 + "/ports/1/" + c)
				m.remove(ib1 + "/ports/1/" + c)
			}
		}, []string{"error-counters"}},
		{"no mounts", func() { m.remove("proc/self/mountinfo") }, []string{"hook"}},
		{"denials that auditd has", func() { m.write("proc/600/comm", "auditd") }, []string{"selinux", "apparmor"}},
		{"a relay that starts", func() { m.relay(func(g *generation.Info) { g.Status.State = generation.StateStarting }) },
			[]string{"relays"}},
		{"a configuration of Docker that is none", func() { m.write("etc/docker/daemon.json", "{") }, []string{"engine-cdi"}},
	} {
		t.Run(strings.ReplaceAll(test.name, " ", "_"), func(t *testing.T) {
			m.t = t
			fake, generateErr := m.fake, m.generateErr
			m.undone = append(m.undone, func() { m.fake, m.generateErr = fake, generateErr })
			defer m.undo()
			test.blind()
			m.keepInstalled()
			m.install()
			found := Examine(context.Background(), m.host(), All())
			var want []string
			for _, c := range test.want {
				want = append(want, "could not tell "+c)
			}
			if diff := cmp.Diff(distinct(want), distinct(wrong(found))); diff != "" {
				t.Errorf("findings (-want +got):\n%s%s", diff, sayings(found))
			}
		})
	}
}

// Only an error of the file system means a lack of permission, not a key that contains the words.
func TestDoctorConfigurationOfFaultyKeyIsFailure(t *testing.T) {
	m := newMade(t)
	m.write("etc/peerlane/config.toml", "\"permission denied\" = 4")
	if list := checkConfiguration(context.Background(), m.host()); len(list) != 1 || list[0].Status != Failure {
		t.Errorf("findings %+v, want one failure", list)
	}
}

// An unreadable configuration is one failure, and the other checks still run.
func TestDoctorUnreadableConfigurationIsOneFault(t *testing.T) {
	m := newMade(t)
	m.write("etc/peerlane/config.toml", "[relay]\nslotsize = 4")
	found := Examine(context.Background(), m.host(), All())
	for _, f := range found {
		if f.Status == Failure && f.Check != "configuration" || f.Check == "configuration" &&
			(f.Status != Failure || !strings.Contains(f.Found, "slotsize")) {
			t.Errorf("%v %s: %s", f.Status, f.Check, f.Found)
		}
	}
}

func TestDoctorHostWithoutDevicesIsReported(t *testing.T) {
	empty := t.TempDir()
	h := &Host{
		Sysfs: filepath.Join(empty, "sys"), Proc: empty, Root: empty, Layout: paths.New(empty), SpecDirs: []string{
			filepath.Join(empty, "cdi")},
		Relays: generation.List, Ask: control.Ask, Staged: staging.StagingByGPU, NVML: &fake{err: topo.ErrNoNVML},
	}
	found := Examine(context.Background(), h, All())
	want := []string{"warning driver", "warning port-state", "warning sandbox", "could not tell dev-char",
		"could not tell xid"}
	if diff := cmp.Diff(distinct(want), distinct(wrong(found))); diff != "" {
		t.Errorf("findings (-want +got):\n%s%s", diff, sayings(found))
	}
}

// A hung driver blocks one check; the other checks report.
func TestDoctorHungCheckDoesNotBlockOthers(t *testing.T) {
	held := make(chan struct{})
	defer close(held)
	checks := []Check{
		{Name: "held", why: "w", remedy: "r", source: "l", run: func(context.Context, *Host) []Finding {
			<-held
			return nil
		}},
		{Name: "quick", run: func(context.Context, *Host) []Finding { return []Finding{ok("host", "fine")} }},
	}
	found := examine(context.Background(), &Host{}, checks, 10*time.Millisecond)
	if len(found) != 2 || found[0].Status != Unknown || !strings.Contains(found[0].Found, "no answer within 10ms") ||
		found[0].Why != "w" || found[1].Status != OK {
		t.Errorf("found %+v", found)
	}
}

// held is an NVML whose calls hang.
type held struct {
	fake
	until chan struct{}
}

func (h *held) GPUs() ([]topo.NVMLGPU, error) {
	<-h.until
	return h.fake.GPUs()
}

// The lookup of a GPU's name, before the checks, has a time limit too.
func TestDoctorHungDriverDelaysNoNames(t *testing.T) {
	m := newMade(t)
	driver := &held{m.fake, make(chan struct{})}
	h := m.host()
	h.NVML = driver
	_, err := h.lane(context.Background(), "2", 10*time.Millisecond)
	if !testutil.HasError(err, &silentError{"2", 10 * time.Millisecond}) {
		t.Errorf("error of a driver that hangs: %v", err)
	}
	close(driver.until)
	if index, err := h.Lane(context.Background(), far); err != nil || index != 2 {
		t.Errorf("driver that answers: %d, %v", index, err)
	}
}

func TestForOmitsFindingsOfOtherLanes(t *testing.T) {
	all := failure("host", "x")
	list := []Finding{all, failure("a", "x").touching([]int{2, 3}), failure("b", "x").touching([]int{4}),
		failure("c", "x").touching([]int{})}
	got := For(list, 3)
	if len(got) != 2 || got[0].On != "host" || got[1].On != "a" {
		t.Errorf("for GPU 3: %+v", got)
	}
	if Worst(got) != Failure || Worst(nil) != OK || !(OK < Unknown && Unknown < Warning && Warning < Failure) {
		t.Error("the worst is not the worst")
	}
}

// Findings list affected lanes: for a server GPU the lanes that stage on it, for a NIC the lanes
// that it carries.
func TestFindingsListAffectedLanes(t *testing.T) {
	m := newMade(t)
	p, err := m.host().readPlan()
	must(t, err)
	server := p.Staging[0].GPU
	var staged []int
	for _, l := range p.Lanes {
		g, err := p.GPU(l.GPU)
		must(t, err)
		if l.GPU == server || slices.Contains(l.Servers, server) {
			staged = append(staged, g.Index)
		}
	}
	for name, want := range map[string][]int{"a small BAR1": staged, "a node without its link": {2},
		"a relay that is down": {2}, "MIG": {6}, "a socket of nobody": nil} {
		i := slices.IndexFunc(faults(), func(f fault) bool { return f.name == name })
		for _, f := range m.suffer(faults()[i]) {
			if f.Status > OK && !slices.Equal(f.Lanes, want) {
				t.Errorf("%s touches the lanes %v, want %v", name, f.Lanes, want)
			}
		}
	}
}

// A fresh self-test takes precedence over the record.
func TestDoctorFreshSelfTestOverridesRecord(t *testing.T) {
	m := newMade(t)
	h := m.host()
	names, err := h.pairs()
	must(t, err)
	for _, n := range names {
		h.Pairs = append(h.Pairs, launch.Pair{PairName: n, Verdict: launch.VerdictWrong, Reason: "a wrong byte"})
	}
	found := checkSelfTest(context.Background(), h)
	if len(found) != len(names) || found[0].Status != Failure {
		t.Errorf("found %+v", found)
	}
}

func TestDoctorDockerWithPeerlaneRuntimeIsOK(t *testing.T) {
	m := newMade(t)
	m.program("dockerd", "Docker version 20.10.24, build 1")
	m.write("etc/docker/daemon.json", `{"runtimes": {"peerlane": {"path": "/usr/bin/peerlane-runtime"}}}`)
	if f := checkEngines(context.Background(), m.host()); f[0].Status != OK ||
		!strings.Contains(f[0].Found, "peerlane-runtime") {
		t.Errorf("found %+v", f[0])
	}
}

// Conditions that resemble a fault have the right severity.
func TestDoctorHarmlessFindingIsNoFault(t *testing.T) {
	m := newMade(t)
	for _, test := range []struct {
		name   string
		change func()
		want   []string
	}{
		{"an idle GPU lowers the speed of its link", func() {
			link, err := filepath.EvalSymlinks(m.path("sys/bus/pci/devices", near))
			must(t, err)
			below, err := filepath.Rel(m.root, link)
			must(t, err)
			m.edit(below+"/current_link_speed", "32.0 GT/s", "2.5 GT/s")
		}, nil},
		{"one of two ports is plugged", func() {
			for name, text := range map[string]string{"state": "1: DOWN", "phys_state": "3: Disabled", "link_layer": "Ethernet",
				"rate": "400 Gb/sec (4X NDR)"} {
				m.write(ib0+"/ports/2/"+name, text)
			}
		}, []string{"warning port-state", "warning port-physical"}},
		{"a NIC that is not meant to be used", func() {
			m.write(ib1+"/ports/1/state", "1: DOWN")
			m.write(ib1+"/ports/1/phys_state", "3: Disabled")
			m.write("etc/peerlane/config.toml", "[plan.exclude]\nnics = [\"mlx5_1\"]")
		}, nil},
		{"DMA-BUF in place of nvidia-peermem", func() { m.remove("sys/module/nvidia_peermem") }, nil},
		{"a container of lane= may lock little", func() {
			m.edit("proc/900/limits", "unlimited            unlimited", "8388608              8388608")
			m.relay(func(g *generation.Info) { g.Config.Lanes[0].Copy = false })
		}, nil},
		{"no port at all", func() {
			for _, ib := range []string{ib0, ib1} {
				m.write(ib+"/ports/1/state", "1: DOWN")
			}
		}, []string{"failure port-state"}},
	} {
		t.Run(strings.ReplaceAll(test.name, " ", "_"), func(t *testing.T) {
			m.t = t
			defer m.undo()
			test.change()
			m.keepInstalled()
			m.install()
			if names, err := m.host().pairs(); err == nil && len(names) > 0 {
				m.passed(func(*launch.Pair) {})
			}
			found := Examine(context.Background(), m.host(), All())
			if diff := cmp.Diff(distinct(test.want), distinct(wrong(found))); diff != "" {
				t.Errorf("findings (-want +got):\n%s%s", diff, sayings(found))
			}
		})
	}
}

func TestMountOfPathIsFound(t *testing.T) {
	const mounts = `22 1 8:1 / / rw - ext4 /dev/sda1 rw
23 22 8:2 / /usr rw,noexec - ext4 /dev/sda2 rw
24 23 8:3 / /usr/lib\040exec rw,nosuid shared:1 - ext4 /dev/sda3 rw
25 22 8:4 / /usr rw - ext4 /dev/sda4 rw
short`
	for path, want := range map[string]string{"/bin/x": "/ rw", "/usr/x": "/usr rw",
		"/usr/lib exec/x": "/usr/lib exec rw,nosuid", "/usrx": "/ rw"} {
		at, options := mountOf(mounts, path)
		if got := at + " " + strings.Join(options, ","); got != want {
			t.Errorf("%s lies on %q, want %q", path, got, want)
		}
	}
}

func TestEngineVersionIsParsed(t *testing.T) {
	m := newMade(t)
	for output, want := range map[string]string{
		"containerd github.com/containerd/containerd v1.6.20-ds1": "1.6.20", "crio version 1.34": "1.34.0", "nothing": "",
	} {
		m.program("engine", output)
		number, err := (&Host{Root: "/"}).version(context.Background(), m.path("usr/bin/engine"))
		if got := dotted(number); err == nil && got != want || err != nil && want != "" {
			t.Errorf("%q is version %s, %v", output, got, err)
		}
	}
	var failed error
	if _, failed = (&Host{Root: "/"}).version(context.Background(), m.path("usr/bin/none")); !errors.Is(failed,
		fs.ErrNotExist) {
		t.Errorf("a program that is not there: %v", failed)
	}
}

// A directory given by --root is untrusted: doctor, as root, runs no program in it.
func TestProgramsOfAnotherRootAreNotRun(t *testing.T) {
	m := newMade(t)
	ran := m.path("ran")
	m.keep(ran)
	m.write("usr/bin/dockerd", "#!/bin/sh\ntouch "+ran+"\necho Docker version 29.0.0")
	m.chmod("usr/bin/dockerd", 0o755)
	h := m.host()
	h.ask = nil
	for _, f := range checkEngines(context.Background(), h) {
		if f.Status != Unknown || !strings.Contains(f.Found, "not run, because") {
			t.Errorf("%v on %s: %s", f.Status, f.On, f.Found)
		}
	}
	if _, err := os.Stat(ran); !absent(err) {
		t.Errorf("dockerd below %s was run: %v", m.root, err)
	}
}

// A relay of an ended container does not count as working.
func TestRelaysThatWorkAreCounted(t *testing.T) {
	m := newMade(t)
	over := trainer()
	over.ID, over.Alive = "b", false
	m.generations = []generation.Info{over, trainer()}
	before := m.answer
	report := &launch.Report{Clients: []launch.Client{
		{Program: launch.ProgramNIXL}, {}, {Program: launch.ProgramNCCL}, {Program: launch.ProgramNIXL},
	}}
	m.answer = control.Answer{Report: report}
	m.undone = append(m.undone, func() { m.generations, m.answer = []generation.Info{trainer()}, before })
	for more, want := range map[int]string{
		0: "containers with a relay: 1, each has answered; sessions: NCCL 1, NIXL 2",
		3: "containers with a relay: 1, each has answered; sessions: NCCL 1, NIXL 2, and 3 more not shown",
	} {
		report.MoreClients = more
		if f := checkRelays(context.Background(), m.host()); len(f) != 1 || f[0].Status != OK || f[0].Found != want {
			t.Errorf("found %+v, want %s", f, want)
		}
	}
}

// doctor reads the files that containerd imports, and directories under other names.
func TestDoctorReadsImportedEngineFiles(t *testing.T) {
	m := newMade(t)
	const table, imports = "[plugins.\"io.containerd.grpc.v1.cri\"]\n", "version = 2\nimports = " +
		"[\"/etc/containerd/conf.d/*.toml\"]\n"
	expect := func(want string, status Status) {
		t.Helper()
		for _, f := range checkEngines(context.Background(), m.host()) {
			if strings.HasPrefix(f.On, "containerd") && (f.Status != status || !strings.Contains(f.Found, want)) {
				t.Errorf("%v: %s; want %v: %s", f.Status, f.Found, status, want)
			}
		}
	}
	m.write("etc/containerd/config.toml", imports)
	m.write("etc/containerd/conf.d/cdi.toml", "version = 2\n"+table+"enable_cdi = true")
	expect("CDI is on", OK)
	m.write("etc/containerd/config.toml", imports+table+"enable_cdi = true")
	m.write("etc/containerd/conf.d/cdi.toml", "version = 2\n"+table+"enable_cdi = false")
	expect("CDI is off", Warning)
	m.write("etc/containerd/conf.d/cdi.toml", "version = 2\n"+table+"enable_cdi = true\ncdi_spec_dirs = [\"/opt/cdi\"]")
	expect("it reads /opt/cdi alone", Failure)
	m.link("opt/cdi", "../etc/cdi")
	expect("CDI is on", OK)
	m.write("etc/containerd/conf.d/cdi.toml", "disabled_plugins = [\"io.containerd.grpc.v1.cri\"]")
	for _, f := range checkEngines(context.Background(), m.host()) {
		if strings.HasPrefix(f.On, "containerd") {
			t.Errorf("containerd without the CRI: %+v", f)
		}
	}
}

// Users paste remedies: only the faulty GPU is reset, a caution precedes the command, and no
// semicolon ends a parameter.
func TestRemediesArePasteable(t *testing.T) {
	m := newMade(t)
	named := func(name string) (list []Finding) {
		i := slices.IndexFunc(faults(), func(f fault) bool { return f.name == name })
		for _, f := range m.suffer(faults()[i]) {
			if f.Status > OK {
				list = append(list, f)
			}
		}
		return list
	}
	if f := named("a GPU off the bus"); len(f) != 1 || !strings.Contains(f[0].Remedy, "nvidia-smi --gpu-reset -i 2") {
		t.Errorf("findings for a GPU off the bus: %+v", f)
	}
	for _, f := range named("ACS redirection") {
		caution, command := strings.Index(f.Remedy, "virtual machine"), strings.Index(f.Remedy, "setpci")
		if caution < 0 || command < caution || !strings.Contains(f.Remedy, `"pci=disable_acs_redir=`) {
			t.Errorf("remedy for ACS redirection: %s", f.Remedy)
		}
	}
}

// FuzzText feeds arbitrary text to the line parsers: every parser returns, with results of one
// line.
func FuzzText(f *testing.F) {
	f.Add("4,7,9,-;NVRM: Xid (PCI:0000:3a:00): 79, pid=1\n SUBSYSTEM=x\n")
	f.Add("23 22 8:2 / /usr\\040x rw,noexec - ext4 /dev/sda2 rw\n195 nvidia\n")
	f.Fuzz(func(t *testing.T, text string) {
		for _, m := range messages(text) {
			if strings.Contains(m, "\n") {
				t.Errorf("a message with two lines: %q", m)
			}
			xidLine.FindStringSubmatch(m)
		}
		mountOf(text, "/usr/x")
		if n := number(text); n < 0 || n > 1e9 {
			t.Errorf("%q is %g", text, n)
		}
		if len([]rune(cut(text))) > 203 {
			t.Errorf("%d runes are left", len([]rune(cut(text))))
		}
		if major := majorOf(text, "nvidia"); major != "" && !deviceNumber.MatchString(major+":0") {
			t.Errorf("major %q", major)
		}
	})
}
