package hook

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/peerlane/peerlane/config"
	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/hook/generation"
	"github.com/peerlane/peerlane/relay/launch"
)

// The hook sets the send channels where a container has a single lane that reaches only the host,
// and the administrator has not set the channels.
func TestNCCLConfOneLocalLaneSetsSendChannels(t *testing.T) {
	const text = "NCCL_NET_PLUGIN=peerlane\n"
	one, two := make([]launch.Lane, 1), make([]launch.Lane, 2)
	for name, c := range map[string]struct {
		config launch.Config
		key    os.FileMode // mode of the file of the cluster key; 0 for no file
		text   string
		set    bool
	}{
		"no cluster key": {launch.Config{Lanes: one, Scope: launch.ScopeAuto}, 0, text, true},
		"scope host":     {launch.Config{Lanes: one, Scope: launch.ScopeHost}, 0o600, text, true},
		"a text without a last newline": {launch.Config{Lanes: one, Scope: launch.ScopeHost}, 0, strings.TrimSpace(text),
			true},
		"a cluster key":                     {launch.Config{Lanes: one, Scope: launch.ScopeAuto}, 0o600, text, false},
		"a key that the supervisor refuses": {launch.Config{Lanes: one, Scope: launch.ScopeAuto}, 0o644, text, true},
		"scope cluster":                     {launch.Config{Lanes: one, Scope: launch.ScopeCluster}, 0, text, false},
		"route staged": {launch.Config{Lanes: one, Scope: launch.ScopeAuto, Route: launch.RouteStaged},
			0, text, false},
		"NVLink in the container": {launch.Config{Lanes: two, Scope: launch.ScopeAuto}, 0, text, false},
		"a comment that names it": {launch.Config{Lanes: one, Scope: launch.ScopeAuto}, 0,
			"# NCCL_NCHANNELS_PER_NET_PEER=2\n" + text, true},
		"the administrator's own number": {launch.Config{Lanes: one, Scope: launch.ScopeAuto}, 0,
			text + "NCCL_NCHANNELS_PER_NET_PEER=2\n", false},
	} {
		t.Run(name, func(t *testing.T) {
			l := paths.New(t.TempDir())
			if err := errors.Join(l.Create(), os.MkdirAll(filepath.Dir(l.ClusterKey()), 0o755)); err != nil {
				t.Fatal(err)
			}
			if c.key != 0 {
				if err := os.WriteFile(l.ClusterKey(), []byte("a secret"), c.key); err != nil {
					t.Fatal(err)
				}
			}
			g := &generation.Generation{Config: c.config, Network: config.Default().Network, NetworkMemory: 1 << 20}
			g.Network.Interfaces = "=lo"
			got, rest := string(addSendChannels(l, g, []byte(c.text))), ""
			if c.set {
				rest = "\n# Added by Peerlane's hook: the container has one lane, which reaches only this " +
					"host.\nNCCL_NCHANNELS_PER_NET_PEER=8\n"
			}
			if got != c.text+rest {
				t.Errorf("%q, want %q", got, c.text+rest)
			}
		})
	}
}
