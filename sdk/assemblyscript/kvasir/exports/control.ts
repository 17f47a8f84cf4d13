// The canonical ABI of `control`, and of memory. Records lie in memory field after field, each aligned
// to its own size; a record that is returned lies where the function's number points. The host frees
// nothing: lists that it passes were made by `cabi_realloc` and are freed here, and an answer stays
// until the next one of its kind. build.sh gives the exports their real names.
import { Policy } from "../policy";

export function cabi_realloc(old: usize, oldSize: usize, align: usize, size: usize): usize {
  if (size == 0) return align;
  return oldSize == 0 ? heap.alloc(size) : heap.realloc(old, size);
}

/** Frees a list that the host passed; an empty one has no memory, but a small number for a pointer. */
export function done(list: usize): void {
  if (list > 16) heap.free(list);
}

/** A list in the answer's area: its address and its length. */
export function answer(area: usize, at: usize, length: usize): usize {
  store<usize>(area, at);
  store<usize>(area, length, 4);
  return area;
}

let policy: Policy | null = null;
export function setPolicy(p: Policy): void {
  policy = p;
}

// Texts of the last answer: what nothing refers to would be collected.
let texts: ArrayBuffer[] = [];
function putText(area: usize, text: string): void {
  const bytes = String.UTF8.encode(text);
  texts.push(bytes);
  answer(area, changetype<usize>(bytes), bytes.byteLength);
}

function putResult(error: string | null): usize {
  const area = memory.data(12, 8);
  texts = [];
  store<u32>(area, error ? 1 : 0);
  if (error) putText(area + 4, error);
  return area;
}

export function control__describe(): usize {
  const area = memory.data(32, 8);
  texts = [];
  const d = policy!.describe();
  putText(area, d.name);
  putText(area + 8, d.version);
  putText(area + 16, slotName);
  const settings = new ArrayBuffer(24 * d.settings.length);
  texts.push(settings);
  for (let i = 0; i < d.settings.length; i++) {
    const at = changetype<usize>(settings) + 24 * i;
    putText(at, d.settings[i].name);
    putText(at + 8, d.settings[i].value);
    putText(at + 16, d.settings[i].doc);
  }
  return answer(area + 24, changetype<usize>(settings), d.settings.length) - 24;
}

let slotName = "";
export function setSlot(name: string): void {
  slotName = name;
}

export function control__configure(pairs: usize, count: usize): usize {
  const names: string[] = [], values: string[] = [];
  for (let at = pairs; at < pairs + 16 * count; at += 16) {
    names.push(String.UTF8.decodeUnsafe(load<usize>(at), load<usize>(at, 4)));
    values.push(String.UTF8.decodeUnsafe(load<usize>(at, 8), load<usize>(at, 12)));
    done(load<usize>(at));
    done(load<usize>(at, 8));
  }
  done(pairs);
  return putResult(configure(names, values));
}

function configure(names: string[], values: string[]): string | null {
  const settings = policy!.describe().settings;
  for (let n = 0; n < names.length; n++) {
    let known = false;
    for (let i = 0; i < settings.length; i++) if (settings[i].name == names[n]) known = true;
    if (!known) return "unknown setting: " + names[n];
  }
  for (let i = 0; i < settings.length; i++) {
    const given = names.lastIndexOf(settings[i].name);
    const error = policy!.configure(settings[i].name, given < 0 ? settings[i].value : values[given]);
    if (error) return error;
  }
  return null;
}

let state = new Uint8Array(0);
export function control__export_state(): usize {
  state = policy!.exportState();
  return answer(memory.data(8, 4), state.dataStart, state.length);
}

export function control__import_state(at: usize, length: usize): usize {
  const copy = new Uint8Array(<i32>length);
  memory.copy(copy.dataStart, at, length);
  done(at);
  return putResult(policy!.importState(copy));
}
