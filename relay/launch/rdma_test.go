package launch

import (
	"encoding/json"
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/peerlane/peerlane/internal/testutil"
)

var rdmaAsked = RDMAJob{
	NICs: []RDMANIC{{Name: "mlx5_0", GPUs: []GPU{{BusID: "0000:17:00.0", Index: 3}}}, {Name: "mlx5_1"}},
}

func TestReadRDMAReturnsReport(t *testing.T) {
	good := `{"nic":"mlx5_0","memory":"host","tried":"read","bytes":4194304,"write":20.5,"read":21}` + "\n" +
		`{"nic":"mlx5_0","gpu":{"busid":"0000:17:00.0","index":3},"memory":"DMA-BUF","tried":"register","failed":"no"}` + "\n"
	want := []RDMAResult{
		{NIC: "mlx5_0", Memory: MemoryHost, Tried: "read", Bytes: 4194304, Write: 20.5, Read: 21},
		{NIC: "mlx5_0", GPU: &rdmaAsked.NICs[0].GPUs[0], Memory: MemoryDMABuf, Tried: "register", Failed: "no"},
	}
	for _, c := range []struct {
		line string
		want error // in line 3; nil for success
	}{
		{"", nil},
		{`{"nic":"mlx5_7","memory":"host","tried":"open"}`, errNotAsked},
		{`{"nic":"mlx5_1","gpu":{"busid":"0000:17:00.0","index":3},"memory":"DMA-BUF","tried":"open"}`, errNotAsked},
		{`{"nic":"mlx5_0","gpu":{"busid":"0000:17:00.0","index":3},"memory":"host","tried":"open"}`,
			&ValueError{"memory", "host", ""}},
		{`{"nic":"mlx5_0","memory":"DMA-BUF","tried":"open"}`, &ValueError{"memory", "DMA-BUF", ""}},
		{`{"nic":"mlx5_0","memory":"disk","tried":"open"}`, &ValueError{"memory", "disk", ""}},
		{`{"nic":"mlx5_0","memory":"host","tried":"read","write":-1}`, &ValueError{"rate in GB/s", -1.0, ""}},
		{`{"nic":"mlx5_0","memory":"host","mood":"fine"}`, &UnknownFieldError{"mood"}},
		{`mlx5_0 is fine`, &json.SyntaxError{Offset: 1}},
	} {
		var got []RDMAResult
		err := ReadRDMA(strings.NewReader(good+c.line), rdmaAsked, func(r RDMAResult) { got = append(got, r) })
		at, _ := errors.AsType[*lineError](err)
		if !testutil.HasError(err, c.want) || (at == nil) != (err == nil) || at != nil && at.line != 3 {
			t.Errorf("%s: %v, want %v in line 3", c.line, err, c.want)
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s: before it (-want +got):\n%s", c.line, diff)
		}
	}
}

func FuzzRDMA(f *testing.F) {
	f.Add(`{"nic":"mlx5_0","memory":"host","tried":"read","bytes":4194304,"write":20.5,"read":21}`)
	f.Add(
		`{"nic":"mlx5_0","gpu":{"busid":"0000:17:00.0","index":3},"memory":"nvidia-peermem","tried":"register","failed":"no"}`,
	)
	f.Add(`{"write":1e999}`)
	f.Fuzz(func(t *testing.T, text string) {
		_ = ReadRDMA(strings.NewReader(text), rdmaAsked, func(r RDMAResult) { // which may be an error
			if r.NIC != "mlx5_0" && r.NIC != "mlx5_1" || r.Write < 0 || r.Read < 0 {
				t.Errorf("%q gives %+v", text, r)
			}
		})
	})
}
