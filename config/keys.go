package config

import (
	"fmt"
	"reflect"
	"slices"
	"strings"
)

// key is a key of a configuration file.
type key struct {
	// name is the full name, "relay.slots"; NAME stands for a name that the administrator chooses.
	name string
	// owner is the type of the struct with the field.
	owner reflect.Type
	field reflect.StructField
	// value is the default value.
	value reflect.Value
}

// keys returns every key, in the order of the fields.
func keys() []key { return keysBelow("", reflect.ValueOf(Default())) }

func keysBelow(prefix string, v reflect.Value) (found []key) {
	for i := range v.NumField() {
		field := v.Type().Field(i)
		tag, _, _ := strings.Cut(field.Tag.Get("toml"), ",")
		name := prefix + tag
		t := field.Type
		switch {
		case t.Kind() == reflect.Struct:
			found = append(found, keysBelow(name+".", v.Field(i))...)
			continue
		case t.Kind() == reflect.Slice && t.Elem().Kind() == reflect.Struct:
			found = append(found, key{"[[" + name + "]]", v.Type(), field, v.Field(i)})
			found = append(found, keysBelow(name+".", reflect.Zero(t.Elem()))...)
			continue
		case t.Kind() == reflect.Map:
			name += ".NAME"
		}
		found = append(found, key{name, v.Type(), field, v.Field(i)})
	}
	return found
}

// Keys returns the names of all keys, such as "relay.slots".
func Keys() (names []string) {
	for _, k := range keys() {
		names = append(names, strings.TrimSuffix(strings.Trim(k.name, "[]"), ".NAME"))
	}
	return names
}

// unknownKey returns the text of the error for an unknown key, with a suggestion.
func unknownKey(name string) string {
	nearest, _ := Nearest(name, Keys())
	return fmt.Sprintf("unknown key %s; did you mean %s? (docs/configuration.md lists all keys)", name, nearest)
}

// Nearest returns the known word with the smallest distance to a misspelt word, and the distance
// in letters. Without known words, nearest is empty.
func Nearest(word string, known []string) (nearest string, letters int) {
	for _, k := range known {
		if d := distance(word, k); nearest == "" || d < letters {
			nearest, letters = k, d
		}
	}
	return nearest, letters
}

// distance returns the number of letters to insert, remove or replace in a to get b (Levenshtein).
func distance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		before := slices.Clone(row)
		row[0] = i + 1
		for j := range len(b) {
			replaced := before[j]
			if a[i] != b[j] {
				replaced++
			}
			row[j+1] = min(replaced, before[j+1]+1, row[j]+1)
		}
	}
	return row[len(b)]
}
