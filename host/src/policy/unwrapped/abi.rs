//! The canonical ABI of the component model, as far as the contract uses it: flat lists, text, and answers that lie in the
//! guest's memory. Nothing that a guest says of its memory is believed.

use crate::policy::guest::State;
use std::cell::Cell;
use wasmtime::{Instance, Memory, Result, Store, TypedFunc, WasmParams, bail};

/// A list or text as it is passed: where it begins, and how many elements it has.
pub(super) type List = (u32, u32);

/// What all calls of an instance need.
pub(super) struct Abi {
    memory: Memory,
    /// Old address and size, alignment, new size.
    realloc: TypedFunc<(u32, u32, u32, u32), u32>,
}

/// Bytes of one answer that are copied to the host: a list may name the same memory again and again.
const COPIED_MAX: usize = 128 << 20;

/// One element of a flat list.
pub(super) trait Flat: Copy {
    const BYTES: usize;
    fn write(self, to: &mut [u8]);
    fn read(from: &[u8]) -> Self;
}

macro_rules! flat {
    ($($number:ty),*) => {$(
        impl Flat for $number {
            const BYTES: usize = size_of::<$number>();

            fn write(self, to: &mut [u8]) {
                to.copy_from_slice(&self.to_le_bytes());
            }

            fn read(from: &[u8]) -> Self {
                Self::from_le_bytes(from.try_into().expect("a chunk has the bytes of a number"))
            }
        }
    )*};
}

flat!(u8, u32, u64, f32);

impl Abi {
    /// # Errors
    /// The module does not export what a component would use.
    pub(super) fn new(store: &mut Store<State>, instance: &Instance) -> Result<Self> {
        let Some(memory) = instance.get_memory(&mut *store, "memory") else {
            bail!("it exports no `memory`")
        };
        Ok(Self { memory, realloc: instance.get_typed_func(store, "cabi_realloc")? })
    }

    /// Copies a list into memory that the guest gives for it, and owns from then on.
    ///
    /// # Errors
    /// The guest traps, or gives no such memory.
    pub(super) fn lower<T: Flat>(&self, store: &mut Store<State>, list: &[T]) -> Result<List> {
        let at = self.place(store, T::BYTES, list.len() * T::BYTES)?;
        let to = &mut self.memory.data_mut(store)[at..][..list.len() * T::BYTES];
        for (to, value) in to.chunks_exact_mut(T::BYTES).zip(list) {
            value.write(to);
        }
        Ok((at as u32, list.len() as u32))
    }

    /// The same for pairs of texts.
    ///
    /// # Errors
    /// As [`Abi::lower`].
    pub(super) fn lower_pairs(&self, store: &mut Store<State>, pairs: &[(String, String)]) -> Result<List> {
        let mut texts = Vec::with_capacity(4 * pairs.len());
        for text in pairs.iter().flat_map(|(name, value)| [name, value]) {
            let (at, bytes) = self.lower(store, text.as_bytes())?;
            texts.extend([at, bytes]);
        }
        let (at, _) = self.lower(store, &texts)?;
        Ok((at, pairs.len() as u32))
    }

    fn place(&self, store: &mut Store<State>, align: usize, bytes: usize) -> Result<usize> {
        let Ok(size) = u32::try_from(bytes) else { bail!("{bytes} bytes are more than a guest can hold") };
        let at = self.realloc.call(&mut *store, (0, 0, align as u32, size))? as usize;
        if !at.is_multiple_of(align) {
            bail!("realloc return: result not aligned");
        }
        if at + bytes > self.memory.data_size(&*store) {
            bail!("realloc return: beyond end of memory");
        }
        Ok(at)
    }

    fn answer<'a>(&self, store: &'a Store<State>) -> Answer<'a> {
        Answer { memory: self.memory.data(store), left: Cell::new(COPIED_MAX) }
    }
}

/// A guest's memory, in which an answer lies.
pub(super) struct Answer<'a> {
    memory: &'a [u8],
    /// Bytes that may still be copied of it.
    left: Cell<usize>,
}

impl<'a> Answer<'a> {
    fn bytes(&self, at: u32, bytes: usize) -> Result<&'a [u8]> {
        let found = self.memory.get(at as usize..).and_then(|rest| rest.get(..bytes));
        let Some(found) = found else { bail!("pointer out of bounds of memory") };
        let Some(left) = self.left.get().checked_sub(bytes) else {
            bail!("an answer of more than {COPIED_MAX} bytes")
        };
        self.left.set(left);
        Ok(found)
    }

    /// The number at an address.
    ///
    /// # Errors
    /// It is not in the memory, or not where such a number may lie.
    pub(super) fn number<T: Flat>(&self, at: u32) -> Result<T> {
        if !(at as usize).is_multiple_of(T::BYTES) {
            bail!("pointer not aligned");
        }
        Ok(T::read(self.bytes(at, T::BYTES)?))
    }

    /// Where a list or text lies, of which an address tells.
    ///
    /// # Errors
    /// As [`Answer::number`].
    pub(super) fn extent(&self, at: u32) -> Result<List> {
        Ok((self.number(at)?, self.number(at.saturating_add(4))?))
    }

    /// The list of which an address tells.
    ///
    /// # Errors
    /// As [`Answer::number`].
    pub(super) fn list<T: Flat>(&self, at: u32) -> Result<Vec<T>> {
        let (at, len) = self.extent(at)?;
        if !(at as usize).is_multiple_of(T::BYTES) {
            bail!("list pointer is not aligned");
        }
        let bytes = self.bytes(at, (len as usize).saturating_mul(T::BYTES))?;
        Ok(bytes.chunks_exact(T::BYTES).map(T::read).collect())
    }

    /// The text of which an address tells.
    ///
    /// # Errors
    /// As [`Answer::number`], or it is no UTF-8.
    pub(super) fn text(&self, at: u32) -> Result<String> {
        let (at, len) = self.extent(at)?;
        Ok(std::str::from_utf8(self.bytes(at, len as usize)?)?.to_owned())
    }

    /// Nothing, or why it was refused.
    ///
    /// # Errors
    /// As [`Answer::text`], or it is neither.
    pub(super) fn outcome(&self, at: u32) -> Result<std::result::Result<(), String>> {
        match self.number::<u8>(at)? {
            0 => Ok(Ok(())),
            1 => self.text(at.saturating_add(4)).map(Err),
            other => bail!("unexpected discriminant: {other}"),
        }
    }
}

/// A function that takes a list and answers nothing.
pub(super) struct Told(TypedFunc<List, ()>);

impl Told {
    /// # Errors
    /// The module has no such function.
    pub(super) fn new(store: &mut Store<State>, instance: &Instance, name: &str) -> Result<Self> {
        instance.get_typed_func(store, name).map(Self)
    }

    /// # Errors
    /// The guest traps, or gives no memory for the list.
    pub(super) fn call<T: Flat>(&self, abi: &Abi, store: &mut Store<State>, list: &[T]) -> Result<()> {
        let list = abi.lower(store, list)?;
        self.0.call(store, list)
    }
}

/// A function whose answer lies in memory until it is read.
pub(super) struct Asked<P> {
    ask: TypedFunc<P, u32>,
    /// Frees what the answer holds.
    post_return: Option<TypedFunc<u32, ()>>,
}

impl<P: WasmParams> Asked<P> {
    /// # Errors
    /// The module has no such function.
    pub(super) fn new(store: &mut Store<State>, instance: &Instance, name: &str) -> Result<Self> {
        let ask = instance.get_typed_func(&mut *store, name)?;
        let post_return = format!("cabi_post_{name}");
        let post_return = match instance.get_export(&mut *store, &post_return) {
            Some(_) => Some(instance.get_typed_func(store, &post_return)?),
            None => None,
        };
        Ok(Self { ask, post_return })
    }

    /// # Errors
    /// The guest traps, or `read` finds no answer where it says.
    pub(super) fn call<R>(
        &self,
        abi: &Abi,
        store: &mut Store<State>,
        params: P,
        read: impl FnOnce(Answer<'_>, u32) -> Result<R>,
    ) -> Result<R> {
        let at = self.ask.call(&mut *store, params)?;
        let answer = read(abi.answer(store), at)?;
        if let Some(post_return) = &self.post_return {
            post_return.call(store, at)?;
        }
        Ok(answer)
    }
}
