package control

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/peerlane/peerlane/config/paths"
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
	for _, dir := range []string{"other/userdata", id + "/other"} {
		write(filepath.Join(podman, "overlay-containers", dir, "config.json"), `{}`)
	}
	hostile := func(text string) string {
		dir := t.TempDir()
		write(filepath.Join(dir, "config.json"), text)
		return dir
	}
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
		{hostile(`{`), nil},
		{hostile(`[]`), nil},
		{hostile(`{"annotations": {"nerdctl/name": "` + id + `"}}`), nil}, // the id is no name
		{hostile(`{"annotations": {"nerdctl/name": "/"}}`), nil},
		{hostile(`{"annotations": {"nerdctl/name": "/n", "io.kubernetes.container.name": "n"}}`), []string{"n"}},
		{hostile(`{"annotations": {"io.kubernetes.pod.namespace": "ml"}}`), nil},
		{hostile(`{"annotations": {"io.kubernetes.pod.name": "job"}}`), []string{"job"}},
		{hostile(`{"mounts": [{"destination": "/etc/hostname", "source": "` + dockers + `/x"}]}`), []string{"trainer"}},
		{hostile(`{"mounts": [{"destination": "/etc/resolv.conf", "source": "` + dockers + `/x"}]}`), []string{"trainer"}},
		{hostile(`{"mounts": [{"destination": "/etc/hosts", "source": "` + dockers + `/hosts"}]}`), nil},
		{hostile(`{"mounts": [{"destination": "/etc/hostname", "source": "` + filepath.Dir(dockers) + `/hostname"}]}`), nil},
		{filepath.Join(podman, "overlay-containers", "other", "userdata"), nil},
		{filepath.Join(podman, "overlay-containers", id, "other"), nil},
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

func TestNamesDamagedFilesOfEnginesGiveNone(t *testing.T) {
	const id = "0123456789ab"
	dir := filepath.Join(t.TempDir(), id)
	bundle := filepath.Join(dir, "userdata")
	if err := os.MkdirAll(bundle, 0o755); err != nil {
		t.Fatal(err)
	}
	list := filepath.Join(filepath.Dir(dir), "containers.json")
	docker := filepath.Join(dir, "config.v2.json")
	for _, c := range []struct{ name, list, docker, wantPodman, wantDocker string }{
		{"no files", "", "", "", ""},
		{"valid files", `[{"id": "0123456789ab", "names": ["p"]}]`, `{"ID": "0123456789ab", "Name": "/d"}`, "p", "/d"},
		{"damaged files", `[{"id": "0123456789ab", "names": ["p"]}`, `{"ID": "0123456789ab", "Name": "/d"`, "", ""},
		{"other types", `{"id": "0123456789ab"}`, `[]`, "", ""},
		{"no names", `[{"id": "0123456789ab", "names": []}]`, `{"ID": "0123456789ab"}`, "", ""},
		{"another container", `[{"id": "x", "names": ["p"]}]`, `{"ID": "x", "Name": "/d"}`, "", ""},
	} {
		for path, text := range map[string]string{list: c.list, docker: c.docker} {
			if text == "" {
				continue
			}
			if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		if got := podmanName(generation.Container{ID: id, Bundle: bundle}); got != c.wantPodman {
			t.Errorf("%s: Podman's name is %q", c.name, got)
		}
		if got := dockerName(dir, id); got != c.wantDocker {
			t.Errorf("%s: Docker's name is %q", c.name, got)
		}
	}
}

func TestContainerOfCgroupIsInnermost(t *testing.T) {
	id, other := strings.Repeat("0a", 32), strings.Repeat("1b", 32)
	for _, c := range []struct{ name, text, want string }{
		{"Docker", "0::/system.slice/docker-" + id + ".scope\n", id},
		{"without systemd", "12:cpu:/docker/" + id + "\n", id},
		{"CRI", "0::/kubepods.slice/cri-containerd-" + id + ".scope/x\n", id},
		{"a container in a container", "0::/docker/" + id + "/docker/" + other + "\n", other},
		{"Podman's monitor", "0::/libpod-conmon-" + id + ".scope\n", ""},
		{"a colon in the path", "0::/a:b/" + id + "\n", id},
		{"the second line", "x\n0:\n1:cpu:/\n0::/" + id, id},
		{"a digit less", "0::/" + id[1:], ""},
		{"a digit more", "0::/" + id + "0", ""},
		{"nothing", "", ""},
	} {
		if got := ContainerOfCgroup(c.text); got != c.want {
			t.Errorf("%s: %q", c.name, got)
		}
	}
}

func TestFindPrefersIdsToNamesToPrefixes(t *testing.T) {
	l := paths.New(t.TempDir())
	if err := l.Create(); err != nil {
		t.Fatal(err)
	}
	if _, err := Find(l, "x"); !errors.Is(err, ErrNoRelay) {
		t.Errorf("without generations: %v", err)
	}
	add := func(digit, container, name, runtime string) string {
		t.Helper()
		id, bundle := strings.Repeat(digit, 32), t.TempDir()
		g := &generation.Generation{ID: id, Container: generation.Container{ID: container, Bundle: bundle,
			RuntimeRoot: runtime}}
		text := fmt.Sprintf(`{"annotations": {"nerdctl/name": %q}}`, name)
		if err := errors.Join(os.Mkdir(l.GenerationDir(id), 0o700), g.Write(l),
			os.WriteFile(filepath.Join(bundle, "config.json"), []byte(text), 0o644)); err != nil {
			t.Fatal(err)
		}
		return id
	}
	one := add("1", "c1", "train", "")
	two := add("2", "c1", "train", "") // a second life
	three := add("3", "c2x", "c1", "")
	four := add("4", "c3x", "twin", "")
	add("5", "c3x", "twin", "/run/other")
	for _, c := range []struct {
		name string
		want []string
	}{
		{"c1", []string{one, two}}, {"train", []string{one, two}}, {three, []string{three}}, {"c2", []string{three}},
		{"1", []string{one}}, {four[:5], []string{four}}, {"c3", nil}, {"c", nil}, {"none", nil}, {"", nil},
	} {
		found, err := Find(l, c.name)
		var got []string
		for _, info := range found {
			got = append(got, info.ID)
		}
		slices.Sort(got)
		if !slices.Equal(got, c.want) || (err == nil) != (c.want != nil) {
			t.Errorf("%q: %v, %v", c.name, got, err)
		}
		if missing := c.name == "none" || c.name == ""; missing != errors.Is(err, ErrNoRelay) {
			t.Errorf("%q: %v", c.name, err)
		}
	}
	if err := os.WriteFile(generation.File(l, one), []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	if found, err := Find(l, three); err != nil || len(found) != 1 {
		t.Errorf("beside an unreadable generation: %d, %v", len(found), err)
	}
	if _, err := Find(l, "none"); !errors.Is(err, ErrNoRelay) || !errors.Is(err, generation.ErrTorn) {
		t.Errorf("the name may belong to the unreadable generation: %v", err)
	}
}
