package control

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/peerlane/peerlane/hook/generation"
)

// Names come from the files of the engines: Docker's file beside the mounted /etc/hostname,
// Podman's list beside the bundle, and the annotations of the CRI.
func TestNamesReadsFilesOfEngines(t *testing.T) {
	const id = "0123456789ab0123456789ab0123456789ab0123456789ab0123456789abcdef"
	write := func(path, text string) {
		t.Helper()
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	docker, podman, pod, crio := t.TempDir(), t.TempDir(), t.TempDir(), t.TempDir()
	dockers := filepath.Join(t.TempDir(), "containers", id)
	write(
		filepath.Join(docker, "config.json"),
		fmt.Sprintf(
			`{"mounts": [{"destination": "/etc/resolv.conf", "source": "%[1]s/resolv.conf"}, {"destination": "/etc/hostname", "source": "%[1]s/hostname"}]}`,
			dockers,
		),
	)
	write(filepath.Join(dockers, "config.v2.json"), fmt.Sprintf(`{"ID": %q, "Name": "/trainer"}`, id))
	userdata := filepath.Join(podman, "overlay-containers", id, "userdata")
	write(filepath.Join(userdata, "config.json"), `{"annotations": {"org.opencontainers.image.stopSignal": "15"}}`)
	write(
		filepath.Join(podman, "overlay-containers/containers.json"),
		fmt.Sprintf(`[{"id": "ff", "names": ["other"]}, {"id": %q, "names": ["trainer", "more"]}]`, id),
	)
	write(
		filepath.Join(pod, "config.json"),
		`{"annotations": {"io.kubernetes.cri.container-name": "worker", "io.kubernetes.cri.sandbox-name": "job-0", "io.kubernetes.cri.sandbox-namespace": "ml"}}`,
	)
	write(
		filepath.Join(crio, "config.json"),
		`{"annotations": {"io.kubernetes.container.name": "worker", "io.kubernetes.pod.name": "job-0", "io.kubernetes.pod.namespace": "ml"}}`,
	)
	for _, c := range []struct {
		bundle string
		want   []string
	}{
		{docker, []string{"trainer"}},
		{userdata, []string{"trainer"}},
		{pod, []string{"worker", "job-0", "ml/job-0"}},
		{crio, []string{"worker", "job-0", "ml/job-0"}},
		{t.TempDir(), nil},
		{"", nil},
	} {
		if got := Names(generation.Container{ID: id, Bundle: c.bundle}); !slices.Equal(got, c.want) {
			t.Errorf("%s: %q, want %q", c.bundle, got, c.want)
		}
	}
	// The bundle of another container, whose mounts an image cannot choose, gives no name.
	write(filepath.Join(dockers, "config.v2.json"), `{"ID": "another", "Name": "/trainer"}`)
	if got := Names(generation.Container{ID: id, Bundle: docker}); got != nil {
		t.Errorf("names of another container: %q", got)
	}
}
