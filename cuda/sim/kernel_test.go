package sim

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/peerlane/peerlane/cuda"
	"github.com/peerlane/peerlane/cuda/kernels"
)

func init() {
	children["kernel faults"] = kernelFaults
	children["kernel late"] = kernelLate
	children["kernel misuse"] = kernelMisuse
}

// beginKernels calls begin, loads the kernels and creates a page.
func beginKernels() (p process, k *kernels.Kernels, page *kernels.Page, err error) {
	if p, err = begin(0, 0); err != nil {
		return p, nil, nil, err
	}
	if k, err = kernels.Load(p.Driver, 0); err != nil {
		return p, nil, nil, err
	}
	page, err = k.NewPage()
	return p, k, page, err
}

// kernelFaults prints the results of three fills and synchronizations under faults.
func kernelFaults() error {
	p, k, _, err := beginKernels()
	if err != nil {
		fmt.Print("begin ", result(err))
		return nil
	}
	for range 3 {
		fmt.Print(result(k.Fill(p.s, p.a, mib, kernels.Pattern{})), " ", result(p.StreamSynchronize(p.s)), "; ")
	}
	return nil
}

func TestInjectedKernelFaultsChangeResults(t *testing.T) {
	dir := host(t, 1)
	for _, c := range []struct{ fault, want string }{
		{"", "0 0; 0 0; 0 0;"},
		{"cuLaunchKernel:after=1:times=1:error=1", "0 0; 1 0; 0 0;"},
		{"cuLaunchKernel:after=1:error=719", "0 0; 0 719; 719 719;"},
		{"cuLaunchKernel:delay=20", "0 0; 0 0; 0 0;"},
		{"cuModuleLoadDataEx:error=218", "begin 218"},
		{"cuModuleGetFunction:after=2:error=500", "begin 500"},
	} {
		if got := answer(t, dir, "kernel faults", "PEERLANE_SIM_FAULT="+c.fault); got != c.want {
			t.Errorf("%s:\n got %q\nwant %q", c.fault, got, c.want)
		}
	}
}

// kernelLate queries a kernel without synchronization.
func kernelLate() error {
	p, k, page, err := beginKernels()
	if err != nil {
		return err
	}
	page.SetFlag(1)
	if err := k.Read(p.s, kernels.Reading{Value: 1, Address: p.a, Size: mib}, page); err != nil {
		return err
	}
	time.Sleep(20 * time.Millisecond)
	if page.Progress().Running {
		return errors.New("a kernel ran without synchronization")
	}
	if err := p.StreamSynchronize(p.s); err != nil {
		return err
	}
	if !page.Progress().Ended {
		return errors.New("a kernel that was waited for did not end")
	}
	return nil
}

func TestLateKernelNeedsSynchronization(t *testing.T) {
	answer(t, host(t, 1), "kernel late", "PEERLANE_SIM_LATE_MS=3600000")
}

func kernelMisuse() error {
	p, k, page, err := beginKernels()
	if err != nil {
		return err
	}
	var wrong []error
	expect := func(what string, err error, want cuda.Result) {
		if want == 0 && err != nil || want != 0 && !errors.Is(err, want) {
			wrong = append(wrong, fmt.Errorf("%s: %v, want %v", what, err, want))
		}
	}
	const head = ".version 6.0\n.target sm_60\n.address_size 64\n.visible .entry "
	_, err = p.ModuleLoadPTX(head + "another() { ret; }")
	expect("a kernel that the simulator lacks", err, cuda.ErrInvalidPTX)
	e, ok := errors.AsType[*cuda.ModuleError](err)
	if !ok || !strings.Contains(e.Log, "simulator") || !strings.Contains(e.Log, "another") {
		wrong = append(wrong, fmt.Errorf("%v does not name the kernel and the simulator", err))
	}
	m, err := p.ModuleLoadPTX(head + "peerlane_spin() { ret; }")
	expect("a module with one of them", err, 0)
	f, err := p.ModuleGetFunction(m, "peerlane_spin")
	expect("the one", err, 0)
	_, err = p.ModuleGetFunction(m, "peerlane_fill")
	expect("one that it does not have", err, cuda.ErrNotFound)
	expect("no blocks", p.Launch(f, 0, 32, p.s, 0, 0, 0), cuda.ErrInvalidValue)
	expect("too many threads", p.Launch(f, 1, 2048, p.s, 0, 0, 0), cuda.ErrInvalidValue)
	expect("its end", p.ModuleUnload(m), 0)
	expect("its second end", p.ModuleUnload(m), cuda.ErrInvalidHandle)
	expect("a kernel of it", p.Launch(f, 1, 32, p.s, 0, 0, 0), cuda.ErrInvalidHandle)

	// A comparison needs read access only.
	readOnly, err := p.memory(0, 2*mib, false)
	expect("read-only memory", err, 0)
	expect("its comparison", k.Compare(p.s, readOnly, mib, kernels.Pattern{}, page), 0)
	expect("the comparison's end", p.StreamSynchronize(p.s), 0)

	// A context can be destroyed while a kernel runs.
	expect("an hour's kernel", k.Spin(p.s, time.Hour, page), 0)
	expect("the context's end", p.CtxDestroy(p.ctx), 0)
	expect("a kernel of another's context", k.Spin(p.s, time.Hour, page), cuda.ErrInvalidContext)
	return errors.Join(wrong...)
}

func TestMisuseOfKernelsReturnsErrors(t *testing.T) { answer(t, host(t, 1), "kernel misuse") }
