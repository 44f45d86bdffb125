package config_test

import (
	"fmt"
	"strings"
	"testing"
)

// Both limits of a number or size are permitted, and the values beside them are refused.
func TestLoadLimitsAreInclusive(t *testing.T) {
	const (
		none = "" // no limit on this side
		last = "4294967294"
	)
	for _, c := range []struct{ table, key, below, min, max, above string }{
		{"verbs", "tc", "-1", "0", "255", "256"},
		{"verbs", "sl", "-1", "0", "15", "16"},
		{"verbs", "pkey", "-1", "0", "65535", "65536"},
		{"verbs", "timeout", "0", "1", "31", "32"},
		{"verbs", "retry_cnt", "-1", "0", "7", "8"},
		{"verbs", "gid_index", "-2", "-1", "255", "256"},
		{"verbs", "reconnect_limit", "0", "1", "3600", "3601"},
		{"verbs", "ar_threshold", "-1", "0", "1073741824", "1073741825"},
		{"verbs", "mtu", "255", "0", "4096", "4097"},
		{"relay", "slots", "0", "1", "1024", "1025"},
		{"relay", "slot_size", `"0KiB"`, `"64KiB"`, `"1GiB"`, `"1048640KiB"`},
		{"relay", "chunk", none, `"0"`, `"1GiB"`, `"1048640KiB"`},
		{"relay", "depth", "-1", "0", none, none},
		{"relay", "streams", "-1", "0", none, none},
		{"relay", "cpus", "0", "1", "4096", "4097"},
		{"relay", "tasks", "127", "128", "1048576", "1048577"},
		{"relay", "memory", `"262143KiB"`, `"256MiB"`, none, none},
		{"relay", "uids", `"0-2"`, `"1-2"`, `"1-` + last + `"`, `"1-4294967295"`},
		{"relay.limits", "clients", "0", "1", "1048576", "1048577"},
		{"relay.limits", "memories", "0", "1", "1048576", "1048577"},
		{"relay.limits", "connections", "0", "1", "1048576", "1048577"},
		{"relay.limits", "descriptors", "0", "1", "1048576", "1048577"},
		{"relay.limits", "staging", `"1023KiB"`, `"1MiB"`, `"1PiB"`, `"1125899906842625"`},
		{"relay.limits", "client_staging", `"1023KiB"`, `"1MiB"`, `"1PiB"`, `"1125899906842625"`},
		{"relay.limits", "host_memory", `"1023KiB"`, `"1MiB"`, `"1PiB"`, `"1125899906842625"`},
		{"relay.limits", "client_host_memory", `"1023KiB"`, `"1MiB"`, `"1PiB"`, `"1125899906842625"`},
		{"staging", "bounce_limit", `"1023KiB"`, `"1MiB"`, `"1PiB"`, `"1125899906842625"`},
		{"staging", "host_limit", none, `"0"`, `"1PiB"`, `"1125899906842625"`},
		{"network", "streams", "0", "1", none, none},
	} {
		t.Run(c.table+"."+c.key, func(t *testing.T) {
			for value, permitted := range map[string]bool{c.below: false, c.min: true, c.max: true, c.above: false} {
				if value == none {
					continue
				}
				_, _, err := load(t, fmt.Sprintf("[%s]\n%s = %s", c.table, c.key, value))
				if permitted && err != nil || !permitted && keyOf(err) != c.table+"."+c.key {
					t.Errorf("%s: %v", value, err)
				}
			}
		})
	}
}

// names returns n different names as a list of TOML.
func names(n int) string {
	var list []string
	for i := range n {
		list = append(list, fmt.Sprintf("\"eth%d\"", i))
	}
	return strings.Join(list, ", ")
}

func TestLoadNameOutsideFormIsRefused(t *testing.T) {
	for _, c := range []struct {
		name, text, key string // key is empty for a permitted text
	}{
		{"an annotation", `tenant_annotation = "a.b/c~!"`, ""},
		{"the longest annotation", fmt.Sprintf("tenant_annotation = %q", strings.Repeat("a", 317)), ""},
		{"a longer annotation", fmt.Sprintf("tenant_annotation = %q", strings.Repeat("a", 318)),
			"network.tenant_annotation"},
		{"an annotation with a blank", `tenant_annotation = "a b"`, "network.tenant_annotation"},
		{"an annotation beyond ASCII", `tenant_annotation = "\u007f"`, "network.tenant_annotation"},
		{"a rail", `rails = ["~!"]`, ""},
		{"sixteen rails", "rails = [" + names(16) + "]", ""},
		{"seventeen rails", "rails = [" + names(17) + "]", "network.rails"},
		{"the longest rail", fmt.Sprintf("rails = [%q]", strings.Repeat("a", 63)), ""},
		{"a longer rail", fmt.Sprintf("rails = [%q]", strings.Repeat("a", 64)), "network.rails"},
		{"a rail with a blank", `rails = ["a b"]`, "network.rails"},
		{"a rail beyond ASCII", `rails = ["\u007f"]`, "network.rails"},
		{"a rail with a slash", `rails = ["a/b"]`, "network.rails"},
	} {
		_, _, err := load(t, "[network]\n"+c.text)
		if (err != nil) != (c.key != "") || err != nil && keyOf(err) != c.key {
			t.Errorf("%s: %v, want an error of the key %q", c.name, err, c.key)
		}
	}
}
