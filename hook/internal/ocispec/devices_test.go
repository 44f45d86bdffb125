package ocispec

import (
	"reflect"
	"testing"
)

func TestRequestedDevicesReadsOptionsOfCreate(t *testing.T) {
	for _, c := range []struct {
		name string
		args []string
		want []Requested
	}{
		{"a GPU", []string{"p", "create", "--gpu", "a"}, []Requested{{GPUs: []string{"a"}}}},
		{"a lane", []string{"p", "create", "--lane", "a"}, []Requested{{Lanes: []string{"a"}}}},
		{"both", []string{"p", "create", "--lane", "a", "--gpu", "b", "--lane", "c"},
			[]Requested{{GPUs: []string{"b"}, Lanes: []string{"a", "c"}}}},
		{"one lane and one GPU", []string{"p", "create", "--gpu", "a", "--lane", "b"},
			[]Requested{{GPUs: []string{"a"}, Lanes: []string{"b"}}}},
		{"an option without a value", []string{"p", "create", "--gpu"}, nil},
		{"another option", []string{"p", "create", "--nic", "a"}, nil},
		{"no option", []string{"p", "create"}, nil},
		{"another command", []string{"p", "remove", "--gpu", "a"}, nil},
		{"no command", []string{"p"}, nil},
		{"no arguments", nil, nil},
	} {
		s := &Spec{}
		s.Hooks.Prestart = []Hook{{Args: c.args}}
		if got := s.RequestedDevices(); !reflect.DeepEqual(got, c.want) {
			t.Errorf("%s: %+v, want %+v", c.name, got, c.want)
		}
	}
}

func TestRequestedDevicesOfEachHookAreSeparate(t *testing.T) {
	s := &Spec{}
	s.Hooks.Prestart = []Hook{{Args: []string{"other"}}, {Args: []string{"p", "create", "--gpu", "a"}}}
	s.Hooks.CreateRuntime = []Hook{{Args: []string{"p", "create", "--lane", "b"}}}
	want := []Requested{{GPUs: []string{"a"}}, {Lanes: []string{"b"}}}
	if got := s.RequestedDevices(); !reflect.DeepEqual(got, want) {
		t.Errorf("%+v, want %+v", got, want)
	}
}
