package generation

import (
	"reflect"
	"strings"
	"testing"
)

func TestPodFollowsAnnotationsOfContainerdAndCRIO(t *testing.T) {
	containerd := map[string]string{
		"io.kubernetes.cri.sandbox-namespace": "research", "io.kubernetes.cri.sandbox-name": "job-0",
		"io.kubernetes.cri.container-name": "main", "io.kubernetes.cri.sandbox-uid": "0a1b",
	}
	crio := map[string]string{
		"io.kubernetes.pod.namespace": "research", "io.kubernetes.pod.name": "job-0",
		"io.kubernetes.container.name": "main", "io.kubernetes.pod.uid": "0a1b",
	}
	without := func(annotations map[string]string, key string) map[string]string {
		rest := map[string]string{}
		for k, v := range annotations {
			if k != key {
				rest[k] = v
			}
		}
		return rest
	}
	long := without(containerd, "")
	long["io.kubernetes.cri.sandbox-name"] = strings.Repeat("n", 254)
	longest := without(containerd, "")
	longest["io.kubernetes.cri.sandbox-name"] = strings.Repeat("n", 253)
	pod := &Pod{Namespace: "research", Name: "job-0", Container: "main", UID: "0a1b"}
	for _, c := range []struct {
		name        string
		annotations map[string]string
		want        *Pod
	}{
		{"containerd", containerd, pod},
		{"CRI-O", crio, pod},
		{"without a pod", without(containerd, "io.kubernetes.cri.sandbox-name"), nil},
		{"without a uid", without(containerd, "io.kubernetes.cri.sandbox-uid"),
			&Pod{Namespace: "research", Name: "job-0", Container: "main"}},
		{"without a namespace", without(crio, "io.kubernetes.pod.namespace"), nil},
		{"Docker", map[string]string{"a": "b"}, nil},
		{"none", nil, nil},
		{"a name that no pod has", long, nil},
		{"the longest name", longest,
			&Pod{Namespace: "research", Name: strings.Repeat("n", 253), Container: "main", UID: "0a1b"}},
	} {
		if got := PodOf(c.annotations); !reflect.DeepEqual(got, c.want) {
			t.Errorf("%s: %+v, expected %+v", c.name, got, c.want)
		}
	}
}
