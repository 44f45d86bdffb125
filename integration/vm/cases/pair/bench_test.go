//go:build vm

package pair_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/peerlane/peerlane/integration/bench"
	"github.com/peerlane/peerlane/integration/vm/inside"
	"github.com/peerlane/peerlane/integration/vm/wiring"
	"github.com/peerlane/peerlane/relay/launch"
)

// `peerlane bench` between two guests measures lanes over RDMA, and says of each row that it
// is one of those.
func TestBenchOverRoCE(t *testing.T) {
	agent := rdma(t, inside.RoCE)
	known(t)
	key, err := os.ReadFile(clusterKey(t))
	if err != nil {
		t.Fatal(err)
	}
	shared, err := os.MkdirTemp("/share", "bench")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(shared); err != nil {
			t.Error(err)
		}
	})
	own := filepath.Join(shared, "etc/peerlane")
	if err := os.MkdirAll(own, 0o755); err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{
		"cluster.key": string(key), "config.toml": "[network]\ninterfaces = \"=rail0\"\n[verbs]\ntimeout = 20\n", // rxe needs it: docs/network.md
	} {
		if err := os.WriteFile(filepath.Join(own, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	program, common := filepath.Join(inside.Binaries, "peerlane"), []string{"bench", "--gpus", "simulated", "--root", shared}
	const port = 19999
	listening := start(t, agent, append([]string{program}, append(common, "--listen")...)...)
	listens(t, agent, port)
	out := inside.Command(t, program, append(common, "--connect", wiring.Address(0, 1), "--transport", "verbs",
		"--sizes", "1MiB", "--depths", "16", "--duration", "300ms", "-o", "json")...)
	table := listening.wait(t)
	r, err := bench.Read(strings.NewReader(out))
	if err != nil {
		t.Fatal(err)
	}
	if len(r.Rows) != 5 { // a stream and 8 bytes each way, and the hand-off
		t.Errorf("%d rows: %+v", len(r.Rows), r.Rows)
	}
	for _, row := range r.Rows {
		if row.Transport != launch.TransportVerbs || row.Value <= 0 || strings.Contains(row.What, " to ") && !strings.Contains(row.Note, "mlx5_0") && !strings.HasPrefix(row.What, "hand-off") {
			t.Errorf("a row is %+v", row)
		}
	}
	if n := strings.Count(table, "over verbs"); n < len(r.Rows) || strings.Contains(table, "over tcp") {
		t.Errorf("the other guest's table has %d rows over verbs:\n%s", n, table)
	}
	t.Log(fmt.Sprint("emulated: ", r.Summary()))
}
