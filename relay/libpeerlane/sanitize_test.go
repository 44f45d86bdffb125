package libpeerlane_test

import (
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"testing"

	"github.com/peerlane/peerlane/cuda"
	"github.com/peerlane/peerlane/cuda/sim"
)

// Eight threads with eight GPUs and random programs, where the library and the simulator
// are both compiled for a sanitizer.
//
// PEERLANE_RANDOM_ROUNDS is the number of messages per thread, PEERLANE_RANDOM_SEED repeats a
// failure's programs.
func TestRandomThreadsUnderSanitizersFinish(t *testing.T) {
	number := func(variable string, otherwise uint64) uint64 {
		if text := os.Getenv(variable); text != "" {
			n, err := strconv.ParseUint(text, 10, 64)
			if err != nil {
				t.Fatal(err)
			}
			return n
		}
		return otherwise
	}
	rounds := number("PEERLANE_RANDOM_ROUNDS", 8)
	seed := number("PEERLANE_RANDOM_SEED", rand.Uint64N(1<<32))
	t.Logf("PEERLANE_RANDOM_SEED=%d", seed)
	eachKind(t, "random", func(t *testing.T, path string) {
		var environment []string
		if k := kindOf[path]; k != plain {
			environment = []string{cuda.LibraryVariable + "=" + simulatorFor(t, k)}
		}
		for _, route := range routes {
			a, b := newHost(t).pair(route, numbers(clients)...)
			args := append([]string{a, b, strconv.FormatUint(seed, 10), strconv.FormatUint(rounds, 10)}, gpus(0, clients)...)
			startIn(t, environment, path, args...).end()
		}
	})
}

// simulatorFor is a simulator that is compiled for a sanitizer. A program with the same sanitizer
// loads it.
func simulatorFor(t *testing.T, k kind) string {
	t.Helper()
	dir := once(t, "simulator-"+string(k), func(dir string) error {
		return sim.Build(
			filepath.Join(dir, sim.LibraryName),
			"-fsanitize="+string(k),
			"-fno-sanitize-recover=all",
			"-O1",
			"-U_FORTIFY_SOURCE",
			"-Wl,-z,undefs",
		)
	})
	return filepath.Join(dir, sim.LibraryName)
}
