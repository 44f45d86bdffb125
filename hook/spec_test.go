package hook

import (
	"testing"

	"github.com/peerlane/peerlane/hook/internal/ocispec"
	"github.com/peerlane/peerlane/hook/internal/testplan"
)

func FuzzSpec(f *testing.F) {
	f.Add(
		[]byte(
			`{"root":{"path":"r"},"process":{"env":["CUDA_VISIBLE_DEVICES=` +
				testplan.UUID0 + `"]},"hooks":{"createRuntime":[{"args":["p","create","--gpu","` +
				testplan.UUID0 + `@0000:17:00.0"]},{"args":["p","create","--gpu","@0000:2a:00.0"]}]}}`,
		),
	)
	f.Add([]byte(`{"root":{"path":"r"},"process":null,"hooks":{"prestart":[{"args":["","create","--lane"]}]}}`))
	plan := testplan.New("/sys")
	f.Fuzz(func(t *testing.T, text []byte) {
		s, err := ocispec.Parse(text)
		if err != nil {
			return
		}
		if err := checkVisibleDevices(plan, s); err != nil && len(s.RequestedDevices()) < 2 {
			t.Errorf("refused for a single device: %v", err)
		}
	})
}
