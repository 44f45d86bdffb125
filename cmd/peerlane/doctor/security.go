package doctor

import (
	"context"
	"fmt"
	"os"
	"strings"
	"syscall"
)

var securityChecks = []Check{
	{
		Name: "selinux", Subject: "security",
		LooksAt: "/sys/fs/selinux/enforce, the boolean container_use_devices, and denials in the kernel's log that name Peerlane",
		Why:     "an enforcing policy can keep containers from the devices of gpu= and nic=, and from the relay's socket, with nothing but \"permission denied\"",
		Remedy:  "setsebool -P container_use_devices 1; ausearch -m avc -c peerlane-relay shows what was denied",
		Run:     checkSELinux,
	},
	{
		Name: "apparmor", Subject: "security",
		LooksAt: "denials in the kernel's log that name Peerlane",
		Why:     "a profile can keep the hook from its files, a relay from its devices, or a container from the relay's socket",
		Remedy:  "allow in the profile that is named what was denied, then apparmor_parser -r PROFILE",
		Run:     checkAppArmor,
	},
	{
		Name: "cluster-key", Subject: "security",
		LooksAt: "owner and mode of the cluster key and of network.tls_key",
		Why:     "whoever has the cluster key is a relay for all other hosts",
		Remedy:  "chmod 600 the file, and peerlane key rotate, for somebody may have read it",
		Run:     checkKey,
	},
}

// denials are the lines of the kernel's log that say so of Peerlane.
func (h *Host) denials(ctx context.Context, mark string) ([]string, error) {
	lines, err := h.kernelLog(ctx)
	var found []string
	for _, l := range lines {
		if strings.Contains(l, mark) && strings.Contains(l, "peerlane") {
			found = append(found, l)
		}
	}
	return found, err
}

func checkSELinux(ctx context.Context, h *Host) []Finding {
	enforce, err := read(h.sys("fs/selinux/enforce"))
	switch {
	case absent(err):
		return []Finding{ok("host", "the kernel has no SELinux, or none is switched on")}
	case err != nil:
		return []Finding{unknown("host", "%s", denied(err))}
	case enforce != "1":
		return []Finding{ok("host", "it is permissive")}
	}
	var list []Finding
	lines, err := h.denials(ctx, "avc:  denied")
	if err != nil {
		list = append(list, unknown("host", "it is enforcing, and the kernel's log cannot be read: %s", denied(err)))
	}
	if len(lines) > 0 {
		list = append(list, failure("host", "it has denied %d accesses, the last one: %s", len(lines), cut(lines[len(lines)-1])).
			remedy("ausearch -m avc -c peerlane-relay | audit2allow -M peerlane-local && semodule -i peerlane-local.pp, once you have read what that allows"))
	}
	// "1 1": now, and when pending changes are committed.
	if value, err := read(h.sys("fs/selinux/booleans/container_use_devices")); err == nil && !strings.HasPrefix(value, "1") {
		list = append(list, warning("host", "it is enforcing, and container_use_devices is off: containers cannot use the devices of gpu= and nic=").remedy("setsebool -P container_use_devices 1"))
	}
	return orFine(list, "it is enforcing, and lets containers use devices")
}

func checkAppArmor(ctx context.Context, h *Host) []Finding {
	enabled, err := read(h.sys("module/apparmor/parameters/enabled"))
	switch {
	case absent(err), err == nil && enabled != "Y":
		return []Finding{ok("host", "it is not switched on")}
	case err != nil:
		return []Finding{unknown("host", "%s", denied(err))}
	}
	lines, err := h.denials(ctx, `apparmor="DENIED"`)
	switch {
	case err != nil:
		return []Finding{unknown("host", "it is on, and the kernel's log cannot be read: %s", denied(err))}
	case len(lines) > 0:
		return []Finding{failure("host", "it has denied %d accesses, the last one: %s", len(lines), cut(lines[len(lines)-1]))}
	}
	return []Finding{ok("host", "it has denied Peerlane nothing that the kernel's log still has")}
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
				remedy("chown root %s && chmod 600 %s, then %s, for somebody may have read it", file.path, file.path, file.remedy))
		}
	}
	if looked == 0 && len(list) == 0 {
		return []Finding{ok("host", "there is none")}
	}
	return orFine(list, "root alone can read it")
}
