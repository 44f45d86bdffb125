package doctor

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/dustin/go-humanize"
	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/hook/selftest"
	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/topo"
)

var gpuChecks = []Check{
	{
		Name: "p2p", subject: "GPUs",
		source: "nvmlDeviceGetP2PStatus of pairs of GPUs with staging",
		why:    "a lane without copies between its GPUs bounces through the CPU's memory",
		remedy: "nvidia-smi topo -p2p w shows the pairs; exclude this pair by plan.exclude.pairs in config.toml, or " +
			"see the checks iommu and acs",
		run: checkP2P,
	},
	{
		Name: "self-test", subject: "GPUs",
		source: "the results of self-tests of this boot and driver (var/lib/peerlane/self-test.json)",
		why: "copies can succeed with wrong bytes; lanes use other servers or host memory in place of a wrong or " +
			"slow pair",
		remedy: "peerlane self-test",
		run:    checkSelfTest,
	},
	{
		Name: "bar1", subject: "GPUs",
		source: "nvmlDeviceGetBAR1MemoryInfo, and the lanes' staging per GPU (peerlane plan)",
		why:    "a NIC reaches GPU memory through BAR1; memory that does not fit cannot be registered",
		remedy: "enable Resizable BAR and Above 4G Decoding in the firmware's setup; or lower relay.slots and " +
			"relay.slot_size in config.toml",
		run: checkBAR1,
	},
	{
		Name: "mig", subject: "GPUs", source: "nvmlDeviceGetMigMode",
		why:    "an instance cannot map another GPU's memory: no lane",
		remedy: "nvidia-smi -mig 0, or use another GPU",
		run: mode("MIG is off", func(g topo.GPU) (string, string) {
			if !g.MIG {
				return "", ""
			}
			return "MIG is on", fmt.Sprintf("nvidia-smi -i %d -mig 0", g.Index)
		}),
	},
	{
		Name: "vgpu", subject: "GPUs", source: "nvmlDeviceGetVirtualizationMode",
		why:    "a share of a GPU cannot map another GPU's memory: no lane",
		remedy: "pass a whole GPU through to this machine",
		run: mode("no GPU is a share of one", func(g topo.GPU) (string, string) {
			if !g.VGPU {
				return "", ""
			}
			return "it is a vGPU", "pass a whole GPU through to this virtual machine"
		}),
	},
	{
		Name: "compute-mode", subject: "GPUs", source: "nvmlDeviceGetComputeMode",
		why: "relay and program both need a context; exclusive mode allows a single process, prohibited mode no " +
			"process",
		remedy: "nvidia-smi -c 0",
		run: mode("compute modes are the default", func(g topo.GPU) (string, string) {
			if g.ComputeMode == "" {
				return "", ""
			}
			return "its compute mode is " + g.ComputeMode, fmt.Sprintf("nvidia-smi -i %d -c 0", g.Index)
		}),
	},
	{
		Name: "mps", subject: "GPUs", source: "the names of processes, /proc/*/comm",
		why:    "MPS serves one user: a relay gets time slices of the GPU, and a fault of a client ends every client",
		remedy: "echo quit | nvidia-cuda-mps-control",
		run:    checkMPS,
	},
	{
		Name: "persistence-mode", subject: "GPUs", source: "nvmlDeviceGetPersistenceMode",
		why: "without persistence mode the driver releases an unused GPU: the next container waits seconds, and " +
			"settings are lost",
		remedy: "systemctl enable --now nvidia-persistenced, or nvidia-smi -pm 1",
		run:    checkPersistence,
	},
	{
		Name: "xid", subject: "GPUs", source: "the kernel's log since the start, /dev/kmsg, for NVRM: Xid",
		why: "the driver reports GPU faults only there; relays on such a GPU fail",
		remedy: "look the number up in NVIDIA's list of Xid errors; drain the lanes (peerlane relay drain --all) and " +
			"reset the one GPU: nvidia-smi --gpu-reset -i N",
		run: checkXid,
	},
}

// mode returns a check of a setting that NVML reports for each GPU. set returns the defect, if
// any, and its remedy.
func mode(fine string, set func(topo.GPU) (found, remedy string)) func(context.Context, *Host) []Finding {
	return func(_ context.Context, h *Host) []Finding {
		t, err := h.topology()
		if err != nil {
			return []Finding{unknown("host", "%s", denied(err))}
		}
		none, count := noNVML(h), 0
		var list []Finding
		for _, g := range t.GPUs {
			if g.Vendor != "" {
				continue
			}
			count++
			if found, remedy := set(g); found != "" {
				list = append(list, failure(gpuName(g), "%s", found).remedy("%s", remedy).touching(h.lanesOfGPU(g.BusID)))
			}
		}
		if count == 0 {
			return notApplicable("there is no NVIDIA GPU")
		}
		if none != nil && len(list) == 0 {
			return none
		}
		return orFine(list, "%s", fine)
	}
}

// noNVML returns one finding for the host if NVML is unavailable, and nil otherwise.
func noNVML(h *Host) []Finding {
	if _, err := h.nvml(); err != nil {
		return []Finding{unknown("host", "%v", err).remedy("see the check driver")}
	}
	return nil
}

func checkP2P(_ context.Context, h *Host) []Finding {
	names, err := h.pairs()
	if err != nil {
		return []Finding{unknown("host", "%s", denied(err))}
	}
	if len(names) == 0 {
		return notApplicable("lanes stage on no pair of GPUs")
	}
	if none := noNVML(h); none != nil {
		return none
	}
	var list []Finding
	for _, n := range names {
		health, why := h.healthOf(n.GPU.BusID)
		if health == nil {
			list = append(list, unknown(n.String(), "%s", why).remedy("see the check driver").touching(
				[]int{n.GPU.Index}))
			continue
		}
		if refused := health.NoP2P[n.Server.BusID]; refused != "" {
			list = append(list, failure(n.String(), "the driver gives no peer-to-peer access: %s",
				refused).touching([]int{n.GPU.Index}))
		}
	}
	return orFine(list, "the driver gives peer-to-peer access to all %d pairs that lanes stage on", len(names))
}

// pairs returns the pairs of GPUs that lanes can stage on.
func (h *Host) pairs() ([]launch.PairName, error) {
	p, err := h.readPlan()
	if err != nil {
		return nil, err
	}
	c, err := h.configuration()
	if err != nil {
		return nil, err
	}
	return selftest.PlannedPairs(p, c)
}

func checkSelfTest(_ context.Context, h *Host) []Finding {
	c, err := h.configuration()
	if err != nil {
		return []Finding{unknown("host", "%s", denied(err))}
	}
	names, err := h.pairs()
	unverified := h.unverified()
	switch {
	case err != nil:
		return []Finding{unknown("host", "%s", denied(err))}
	case len(names) == 0 && len(unverified) > 0:
		return unverified
	case len(names) == 0:
		return notApplicable("lanes stage on no pair of GPUs")
	case c.Relay.SelfTest == launch.SelfTestOff && len(h.Pairs) == 0:
		return []Finding{
			warning("host", `relay.self_test is "off": nothing says whether copies between GPUs are right`).remedy(
				`take relay.self_test = "off" out of %s`, h.Layout.ConfigFile())}
	}
	known := h.Pairs
	if len(known) == 0 {
		record, err := h.record()
		switch {
		case absent(err):
		case err != nil:
			return []Finding{unknown("host", "%s", denied(err))}
		}
		known = record
	}
	var list []Finding
	untested := 0
	for _, n := range names {
		switch p := launch.FindPair(known, n); {
		case p == nil:
			untested++
		case p.Verdict == launch.VerdictWrong:
			list = append(list, failure(n.String(), "copies are wrong: %s",
				p.Reason).remedy("see the checks iommu and acs, then peerlane self-test "+
				"--again").touching([]int{n.GPU.Index}))
		case p.Verdict == launch.VerdictSlow:
			list = append(list, warning(n.String(), "copies are slower than through the CPU's memory: %s",
				p.Reason).remedy("see to PCIe links and ACS, then peerlane self-test --again").touching([]int{n.GPU.Index}))
		case p.Verdict == launch.VerdictUntested:
			list = append(list, unknown(n.String(), "it could not be tested: %s",
				p.Reason).remedy("peerlane self-test --again").touching([]int{n.GPU.Index}))
		}
	}
	list = append(list, unverified...)
	if untested > 0 {
		list = append(list, unknown("host", "%d of %d pairs have not been tested since the host was started", untested,
			len(names)))
	}
	return orFine(list, "all %d pairs that lanes stage on have passed", len(names))
}

// record returns the self-test results of this boot and driver.
func (h *Host) record() ([]launch.Pair, error) {
	r, err := h.selfTests()
	if err != nil {
		return nil, err
	}
	return r.Pairs, nil
}

// unverified returns a finding for each recorded result of GPUs and a NIC that is not good.
func (h *Host) unverified() (list []Finding) {
	r, err := h.selfTests()
	if err != nil {
		return nil // the check of pairs reports the error
	}
	for _, t := range r.Triples {
		if t.Verdict != launch.VerdictGood {
			list = append(list, tripleFinding(t))
		}
	}
	return list
}

func (h *Host) selfTests() (*launch.PairRecord, error) {
	text, err := read(h.Layout.SelfTestFile())
	if err != nil {
		return nil, err
	}
	r, err := launch.ReadPairRecord([]byte(text))
	if err != nil {
		return nil, fmt.Errorf("%s: %w", h.Layout.SelfTestFile(), err)
	}
	boot, err := read(h.proc("sys/kernel/random/boot_id"))
	if err != nil {
		return nil, err
	}
	module, err := read(h.sys("module/nvidia/version"))
	if err != nil && !absent(err) {
		return nil, err
	}
	if r.Boot != boot || r.Module != module {
		return nil, os.ErrNotExist
	}
	return &r, nil
}

func checkBAR1(_ context.Context, h *Host) []Finding {
	p, err := h.readPlan()
	if err != nil {
		return []Finding{unknown("host", "%s", denied(err))}
	}
	needs := map[string]uint64{}
	for _, s := range p.Staging {
		needs[s.GPU] = s.All
	}
	if none := noNVML(h); none != nil && len(p.GPUs) > 0 {
		return none
	}
	bad := false
	list := h.aboutGPUs(func(g topo.GPU) []Finding {
		health, why := h.healthOf(g.BusID)
		lanes := h.lanesOfGPU(g.BusID)
		need := needs[g.BusID]
		var f Finding
		switch {
		case health == nil:
			f = unknown(gpuName(g), "%s", why).remedy("see the check driver")
		case health.BAR1 == 0:
			f = unknown(gpuName(g), "NVML does not tell: %s", or(strings.Join(health.Failures, "; "), "it is not "+
				"supported"))
		case health.BAR1 < need:
			f = failure(gpuName(g), "its BAR1 has %s, and the lanes that it serves take %s", humanize.IBytes(health.BAR1),
				humanize.IBytes(need))
		case health.BAR1Free < need:
			f = warning(gpuName(g), "%s of its BAR1 are free, and the lanes that it serves take %s",
				humanize.IBytes(health.BAR1Free), humanize.IBytes(need))
		case health.Memory > 0 && health.BAR1 < health.Memory:
			f = warning(gpuName(g), "its BAR1 has %s, and its memory %s: a program cannot register all of that",
				humanize.IBytes(health.BAR1), humanize.IBytes(health.Memory))
		default:
			return nil
		}
		bad = true
		return []Finding{f.touching(lanes)}
	})
	if !bad && len(list) > 0 {
		return list // no GPU, or no topology
	}
	return orFine(list, "each BAR1 has room for what is staged there, and for the GPU's memory")
}

// mpsPrograms are the process names of MPS; the kernel truncates names to 15 bytes.
var mpsPrograms = []string{"nvidia-cuda-mps-control", "nvidia-cuda-mps-server"}

func checkMPS(_ context.Context, h *Host) []Finding {
	found, err := h.processes(func(comm string) bool {
		return slices.ContainsFunc(mpsPrograms, func(p string) bool { return comm == p[:15] })
	})
	if err != nil {
		return []Finding{unknown("host", "%s", denied(err))}
	}
	if len(found) > 0 {
		pid := slices.Min(slices.Collect(maps.Keys(found)))
		return []Finding{warning("host", "MPS runs (process %d)", pid)}
	}
	return []Finding{ok("host", "MPS does not run")}
}

// processes returns the matching processes, names by pid.
func (h *Host) processes(wanted func(comm string) bool) (map[int]string, error) {
	entries, err := os.ReadDir(h.Proc)
	if err != nil {
		return nil, err
	}
	found := map[int]string{}
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		comm, err := read(h.proc(e.Name(), "comm"))
		if err == nil && wanted(comm) { // after an error the process has ended
			found[pid] = comm
		}
	}
	return found, nil
}

func checkPersistence(_ context.Context, h *Host) []Finding {
	if t, err := h.topology(); err == nil && len(t.GPUs) > 0 {
		if none := noNVML(h); none != nil {
			return none
		}
	}
	var off []string
	lanes := []int{}
	list := h.aboutGPUs(func(g topo.GPU) []Finding {
		health, why := h.healthOf(g.BusID)
		switch {
		case health == nil:
			return []Finding{unknown(gpuName(g), "%s", why).remedy("see the check driver").touching(
				h.lanesOfGPU(g.BusID))}
		case health.Persistence == nil:
			return []Finding{unknown(gpuName(g), "NVML does not tell: %s",
				or(strings.Join(health.Failures, "; "), "it is not supported")).touching(h.lanesOfGPU(g.BusID))}
		case !*health.Persistence:
			off = append(off, strconv.Itoa(g.Index))
			lanes = append(lanes, h.lanesOfGPU(g.BusID)...)
		}
		return nil
	})
	if len(off) > 0 {
		slices.Sort(lanes)
		list = append(list, warning("GPUs "+strings.Join(off, ", "), "it is off").touching(slices.Compact(lanes)))
	}
	return orFine(list, "it is on")
}

// xidLine matches lines of NVIDIA's driver: "NVRM: Xid (PCI:0000:3b:00): 79, pid=..., ...".
var xidLine = regexp.MustCompile(
	`NVRM: Xid \(PCI:([0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2})(?:\.[0-7])?\): (\d{1,4}),?(.*)`)

// byPrograms are the Xids that programs cause, by NVIDIA's list.
var byPrograms = []int{13, 31, 43, 45, 68, 69}

func checkXid(ctx context.Context, h *Host) []Finding {
	lines, err := h.kernelLog(ctx)
	if err != nil {
		return []Finding{unknown("host", "%s", denied(err))}
	}
	type fault struct {
		gpu    string
		number int
	}
	count, last := map[fault]int{}, map[fault]string{}
	for _, line := range lines {
		m := xidLine.FindStringSubmatch(line)
		if m == nil {
			continue
		}
		busID, err := topo.ParseBusID(m[1] + ".0")
		if err != nil {
			continue // unreachable: the pattern has matched
		}
		number, _ := strconv.Atoi(m[2]) // at most four digits
		f := fault{busID, number}
		count[f]++
		last[f] = strings.TrimSpace(m[3])
	}
	var list []Finding
	for _, f := range slices.SortedFunc(maps.Keys(count), func(a, b fault) int {
		if a.gpu != b.gpu {
			return strings.Compare(a.gpu, b.gpu)
		}
		return a.number - b.number
	}) {
		on, index := "GPU "+f.gpu, f.gpu // nvidia-smi accepts both
		if t, err := h.topology(); err == nil {
			if g, err := t.FindGPU(f.gpu); err == nil {
				on, index = gpuName(g), strconv.Itoa(g.Index)
			}
		}
		finding := failure
		if slices.Contains(byPrograms, f.number) {
			finding = warning
		}
		found := finding(on, "Xid %d, %d times, the last one:%s", f.number, count[f], or(" "+cut(last[f]), " without a "+
			"word")).
			remedy("look the number up in NVIDIA's list of Xid errors; then, where that says so: peerlane relay drain "+
				"--all "+
				"&& nvidia-smi --gpu-reset -i %s", index)
		if slices.Contains(byPrograms, f.number) {
			found = found.remedy("a program that used the GPU has most likely failed by itself: look at its log")
		}
		list = append(list, found.touching(h.lanesOfGPU(f.gpu)))
	}
	return orFine(list, "it has none")
}

// cut truncates a log line to 200 characters.
func cut(text string) string {
	if r := []rune(strings.ToValidUTF8(text, "?")); len(r) > 200 {
		return string(r[:200]) + "..."
	}
	return strings.ToValidUTF8(text, "?")
}

// maxLog limits the bytes read from the kernel's log, which has some megabytes.
const maxLog = 64 << 20

// kernelLog returns the messages of /dev/kmsg without prefixes, oldest first, and does not wait
// for new messages. The device returns one record per read; the file of a test returns many.
func (h *Host) kernelLog(ctx context.Context) ([]string, error) {
	path := h.path("dev/kmsg")
	// Package os would wait for the next message in its poller.
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_NONBLOCK|unix.O_CLOEXEC|unix.O_NOCTTY, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: path, Err: err}
	}
	defer unix.Close(fd)
	var text strings.Builder
	buffer := make([]byte, 16<<10) // a record has 8 KiB at most
	for text.Len() < maxLog {
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		n, err := unix.Read(fd, buffer)
		switch {
		case errors.Is(err, unix.EAGAIN), err == nil && n == 0:
			return messages(text.String()), nil
		case errors.Is(err, unix.EPIPE): // the kernel has overwritten the record
		case errors.Is(err, unix.EINTR):
		case err != nil:
			return nil, &os.PathError{Op: "read", Path: path, Err: err}
		default:
			text.Write(buffer[:n])
		}
	}
	return messages(text.String()), nil
}

// messages removes the prefix of each record ("6,1234,5678,-;message") and the continuation lines
// with keys, which begin with a blank.
func messages(text string) (list []string) {
	for line := range strings.Lines(text) {
		line = strings.TrimRight(line, "\n")
		if line == "" || line[0] == ' ' {
			continue
		}
		if _, message, ok := strings.Cut(line, ";"); ok {
			line = message
		}
		list = append(list, line)
	}
	return list
}
