package doctor

import (
	"context"
	"errors"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/peerlane/peerlane/config"
	catalogue "github.com/peerlane/peerlane/internal/fault"
)

var securityChecks = []Check{
	{
		Name: "selinux", subject: "security",
		source: "/sys/fs/selinux/enforce, the boolean container_use_devices, and denials since the start that name " +
			"Peerlane: in the kernel's log, and where auditd runs at the end of /var/log/audit/audit.log",
		why:    "an enforcing policy can deny devices and the relay's socket",
		remedy: "setsebool -P container_use_devices 1; ausearch -m avc -c peerlane-relay shows the denials",
		run:    checkSELinux,
	},
	{
		Name: "apparmor", subject: "security",
		source: "denials since the start that name Peerlane: in the kernel's log, and where auditd runs at the end of " +
			"/var/log/audit/audit.log",
		why:    "a profile can deny files to the hook, devices to a relay, or the socket to a container",
		remedy: "allow the denied access in the named profile, then apparmor_parser -r PROFILE",
		run:    checkAppArmor,
	},
	{
		Name: "cluster-key", subject: "security",
		source: "owner and mode of the cluster key and of network.tls_key",
		why:    "a process with the cluster key can act as a relay for every host",
		remedy: "chmod 600 the file, and peerlane key rotate, because another user may have read the key",
		run:    checkKey,
	},
	{
		Name: "sandbox", subject: "security",
		source: "the mode of peerlane-relay, the pids controller of cgroup2, and missing parts of the sandboxes of " +
			"running relays (peerlane relay inspect)",
		why: "a container with CAP_SETUID can take a relay's uid, trace a relay whose program that uid can read, and " +
			"exhaust RLIMIT_NPROC",
		remedy: "peerlane relay inspect CONTAINER shows the missing parts with reasons",
		run:    checkSandbox,
	},
}

// auditLog is the file to which auditd diverts messages from the kernel's log.
const auditLog = "var/log/audit/audit.log"

// denials returns the lines about Peerlane since boot that contain mark, from the logs of the
// kernel and of auditd. The error names the unreadable log.
func (h *Host) denials(ctx context.Context, mark string) (found []string, err error) {
	about := func(line string) bool { return strings.Contains(line, mark) && strings.Contains(line, "peerlane") }
	lines, err := h.kernelLog(ctx)
	if err != nil {
		err = fmt.Errorf("the kernel's log cannot be read: %s", denied(err))
	}
	for _, l := range lines {
		if about(l) {
			found = append(found, l)
		}
	}
	records, unseen := h.auditRecords()
	if unseen != nil {
		err = errors.Join(err, fmt.Errorf("auditd's log cannot be read: %s", denied(unseen)))
	}
	for _, l := range records {
		if about(l) {
			found = append(found, l)
		}
	}
	return found, err
}

// auditTime matches the time of a record of auditd.
var auditTime = regexp.MustCompile(`\baudit\((\d{1,12})\.\d+:\d+\)`)

// auditRecords returns the records since boot at the end of auditd's log; empty without auditd.
func (h *Host) auditRecords() (list []string, err error) {
	daemons, err := h.processes(func(comm string) bool { return comm == "auditd" })
	if err != nil || len(daemons) == 0 {
		return nil, err
	}
	stat, err := read(h.proc("stat"))
	if err != nil {
		return nil, err
	}
	var start int64
	for line := range strings.Lines(stat) {
		fmt.Sscanf(line, "btime %d", &start) // other lines leave start unchanged
	}
	text, err := readTail(h.path(auditLog))
	if err != nil {
		return nil, err
	}
	for line := range strings.Lines(text) {
		if m := auditTime.FindStringSubmatch(line); m != nil {
			if at, err := strconv.ParseInt(m[1], 10, 64); err == nil && at >= start {
				list = append(list, strings.TrimRight(line, "\n"))
			}
		}
	}
	return list, nil
}

func checkSELinux(ctx context.Context, h *Host) []Finding {
	enforce, err := read(h.sys("fs/selinux/enforce"))
	switch {
	case absent(err):
		return notApplicable("the kernel has no SELinux, or none is switched on")
	case err != nil:
		return []Finding{unknown("host", "%s", denied(err))}
	case enforce != "1":
		return []Finding{ok("host", "it is permissive")}
	}
	var list []Finding
	lines, err := h.denials(ctx, "avc:  denied")
	if err != nil {
		list = append(list, unknown("host", "it is enforcing, and %s", oneLine(err)))
	}
	if len(lines) > 0 {
		list = append(list, failure("host", "it has denied %d accesses, the last one: %s", len(lines),
			cut(lines[len(lines)-1])).
			remedy("ausearch -m avc -c peerlane-relay | audit2allow -M peerlane-local && semodule -i peerlane-local.pp, once "+
				"you have read what that allows"))
	}
	// The file has two values, "1 1": the present one, and the one after pending changes are
	// committed.
	if value, err := read(h.sys("fs/selinux/booleans/container_use_devices")); err == nil &&
		!strings.HasPrefix(value, "1") {
		list = append(list,
			warning("host",
				"it is enforcing, and container_use_devices is off: containers cannot use the devices of gpu= and nic=").remedy(
				"setsebool -P container_use_devices 1"))
	}
	return orFine(list, "it is enforcing, and lets containers use devices")
}

func checkAppArmor(ctx context.Context, h *Host) []Finding {
	enabled, err := read(h.sys("module/apparmor/parameters/enabled"))
	switch {
	case absent(err), err == nil && enabled != "Y":
		return notApplicable("it is not switched on")
	case err != nil:
		return []Finding{unknown("host", "%s", denied(err))}
	}
	lines, err := h.denials(ctx, `apparmor="DENIED"`)
	var list []Finding
	if err != nil {
		list = append(list, unknown("host", "it is on, and %s",
			oneLine(err)).remedy("ausearch -m avc -ts boot | grep peerlane, as root"))
	}
	if len(lines) > 0 {
		list = append(list, failure("host", "it has denied %d accesses, the last one: %s", len(lines),
			cut(lines[len(lines)-1])))
	}
	return orFine(list, "it has denied Peerlane nothing that the logs still have")
}

// relayProgram is the path of the relay in packages.
const relayProgram = "usr/libexec/peerlane/peerlane-relay"

func checkSandbox(_ context.Context, h *Host) []Finding {
	c, err := h.configuration()
	if err != nil {
		return []Finding{unknown("host", "%s", denied(err))}
	}
	if c.Relay.Sandbox == config.SandboxOff {
		return []Finding{warning("host", "relays run without a sandbox").remedy(
			"remove relay.sandbox from %s, and restart containers", h.Layout.ConfigFile())}
	}
	var list []Finding
	program := or(c.Relay.Binary, h.path(relayProgram))
	info, err := os.Stat(program)
	switch {
	case absent(err):
	case err != nil:
		list = append(list, unknown(program, "%s", denied(err)))
	case info.Mode()&0o004 != 0:
		list = append(list,
			warning(program,
				"each user can read it (mode %04o), so that the kernel lets processes of a relay's uid trace that relay while "+
					"it starts", info.Mode().Perm()).
				remedy("chmod 711 %s", program))
	}
	if _, err := os.Lstat(h.Layout.Launcher()); err != nil { // otherwise systemd starts relays, in units with TasksMax=
		v2, err := read(h.sys("fs/cgroup/cgroup.controllers"))
		if absent(err) {
			v2, err = read(h.sys("fs/cgroup/unified/cgroup.controllers"))
		}
		switch {
		case err != nil && !absent(err):
			list = append(list, unknown("host", "%s", denied(err)))
		case !slices.Contains(strings.Fields(v2), "pids"):
			list = append(list,
				warning("host",
					"cgroup2 has no pids controller here, so RLIMIT_NPROC limits the tasks of relays, and a container that takes a "+
						"relay's uid can use it up").
					remedy("boot with control groups of version 2 alone (systemd.unified_cgroup_hierarchy=1), or have systemd start "+
						"relays: systemctl enable --now peerlane-relay.socket"))
		}
	}
	generations, _ := h.generations() // the check "relays" reports the error
	for _, g := range generations {
		if !g.Alive || g.Status.Sandbox == nil || len(g.Status.Sandbox.Missing) == 0 {
			continue
		}
		missing := g.Status.Sandbox.Missing
		list = append(list, warning("container "+cut(g.Container.ID), "its relay's sandbox lacks %d things, the first: %s",
			len(missing), cut(missing[0])).
			remedy("peerlane explain %s has the remedies; peerlane relay inspect %s lists all of them",
				catalogue.NoSandbox, cut(g.Container.ID)).touching(lanesOf(g)))
	}
	return orFine(list, "processes of a relay's uid can neither trace the relay nor use up its tasks")
}

func checkKey(_ context.Context, h *Host) []Finding {
	c, err := h.configuration()
	if err != nil {
		return []Finding{unknown("host", "%s", denied(err))}
	}
	var list []Finding
	looked := 0
	for _, file := range []struct{ path, remedy string }{
		{or(c.Network.Key, h.Layout.ClusterKey()), "peerlane key rotate"},
		{c.Network.TLSKey, "have the authority issue another one"},
	} {
		if file.path == "" {
			continue
		}
		info, err := os.Stat(file.path)
		if absent(err) {
			continue
		}
		if err != nil {
			list = append(list, unknown(file.path, "%s", denied(err)))
			continue
		}
		looked++
		uid := info.Sys().(*syscall.Stat_t).Uid // as package os documents for Linux
		var wrong []string
		if mode := info.Mode().Perm(); mode&0o077 != 0 {
			wrong = append(wrong, fmt.Sprintf("others than its owner can read or write it (mode %04o)", mode))
		}
		if uid != 0 && int(uid) != os.Geteuid() {
			wrong = append(wrong, fmt.Sprintf("it belongs to uid %d", uid))
		}
		if len(wrong) > 0 {
			list = append(list, failure(file.path, "%s", strings.Join(wrong, ", ")).
				remedy("chown root %s && chmod 600 %s, then %s, because another user may have read "+
					"it", file.path, file.path, file.remedy))
		}
	}
	if looked == 0 && len(list) == 0 {
		return notApplicable("there is none")
	}
	return orFine(list, "root alone can read it")
}
