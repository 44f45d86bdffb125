package main

import (
	"testing"

	"github.com/peerlane/peerlane/relay/launch"
)

func TestWritesWordsNamesMethodsAndTimes(t *testing.T) {
	for _, c := range []struct {
		writes launch.Writes
		want   string
	}{
		{launch.Writes{GPU: "0000:17:00.0", Words: 16}, "into 0000:17:00.0: words up to 16 bytes, then two rows up to 32 " +
			"KiB (not measured)"},
		{launch.Writes{GPU: "0000:17:00.0", Words: 8, Measured: []launch.WriteTime{{Bytes: 8, Words: 5.59, Rows: 8.5},
			{Bytes: 16, Words: 12, Rows: 8.52}}},
			"into 0000:17:00.0: words up to 8 bytes, then two rows up to 32 KiB (words and rows, µs: 8 B 5.6 and 8.5, 16 B " +
				"12.0 and 8.5)"},
		{launch.Writes{GPU: "0000:17:00.0", Words: 16, Stores: 4096, Measured: []launch.WriteTime{
			{Bytes: 16, Words: 6, Rows: 8.52, Stores: 1.18}, {Bytes: 4096, Rows: 9.1, Stores: 1.7}}},
			"into 0000:17:00.0: stores of the CPU up to 4096 bytes; of memory that is not mapped in BAR1, words up " +
				"to 16 bytes, then two rows up to 32 KiB (stores, words and rows, µs: 16 B 1.2, 6.0 and 8.5, " +
				"4096 B 1.7, – and 9.1)"},
		{launch.Writes{GPU: "0000:17:00.0", Words: 16, NoStores: "no stores on arm64"},
			"into 0000:17:00.0: words up to 16 bytes, then two rows up to 32 KiB (not measured); no stores: no " +
				"stores on arm64"},
	} {
		if got := writesWords(c.writes); got != c.want {
			t.Errorf("%+v\n got %q\nwant %q", c.writes, got, c.want)
		}
	}
}
