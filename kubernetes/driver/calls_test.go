package driver

import (
	"context"
	"fmt"
	"maps"
	"testing"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	k8stesting "k8s.io/client-go/testing"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"

	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/hook/generation"
	"github.com/peerlane/peerlane/internal/testutil"
	"github.com/peerlane/peerlane/kubernetes/lanes"
)

// node is a driver of a node that only publishes.
type node struct {
	*Driver
	layout paths.Layout
	calls  func() map[string]int
}

// observed returns a channel that the next observation closes.
func (n node) observed() <-chan struct{} {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.changed
}

// publishing starts the driver of a node without the services for the kubelet. calls counts the requests to
// the API.
func publishing(t *testing.T, name string) node {
	t.Helper()
	d, layout := newDriver(t, Config{})
	d.config.Node = name
	client := fake.NewClientset(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, UID: types.UID(name)}})
	// The controller of slices recognizes its slice by the prefix of the name.
	client.PrependReactor("create", "resourceslices", func(a k8stesting.Action) (bool, runtime.Object, error) {
		created := a.(k8stesting.CreateAction).GetObject().(*resourceapi.ResourceSlice)
		created.Name = created.GenerateName + "x"
		return false, nil, nil
	})
	ctx, cancel := context.WithCancel(t.Context())
	helper, err := kubeletplugin.Start(ctx, d, kubeletplugin.DriverName(lanes.DriverName),
		kubeletplugin.KubeClient(client), kubeletplugin.NodeName(name), kubeletplugin.DRAService(false),
		kubeletplugin.RegistrationService(false))
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- d.Run(ctx, helper) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
		helper.Stop()
	})
	return node{d, layout, func() map[string]int {
		calls := map[string]int{}
		for _, a := range client.Actions() {
			calls[a.GetVerb()+" "+a.GetResource().Resource]++
		}
		return calls
	}}
}

// Each node of a cluster makes these requests, whose number docs/benchmarks/scale.md multiplies.
func TestDriverMakesFewRequests(t *testing.T) {
	n := publishing(t, "n1")
	requests := map[string]int{}
	until := func(condition string, more ...string) {
		t.Helper()
		for _, request := range more {
			requests[request]++
		}
		testutil.Succeeds(t, condition, func() error {
			if got := n.calls(); !maps.Equal(got, requests) {
				return fmt.Errorf("the requests are %v; %v are expected", got, requests)
			}
			return nil
		})
	}
	until("the driver publishes", "get nodes", "list resourceslices", "watch resourceslices", "create resourceslices")
	for range 20 { // observations of an unchanged host
		<-n.observed()
	}
	until("the host is unchanged")
	if err := generation.DrainAll(n.layout); err != nil {
		t.Fatal(err)
	}
	until("the driver publishes taints", "update resourceslices")
}
