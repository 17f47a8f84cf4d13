//! The runs of many blocks in one list.

/// Runs of memory, block after block.
pub(super) struct Runs<T> {
    all: Vec<T>,
    /// Where the runs of each block end.
    ends: Vec<usize>,
}

impl<T> Runs<T> {
    pub(super) fn with_capacity(blocks: usize, runs: usize) -> Self {
        Self { all: Vec::with_capacity(blocks * runs), ends: Vec::with_capacity(blocks) }
    }

    pub(super) fn push(&mut self, runs: impl IntoIterator<Item = T>) {
        self.all.extend(runs);
        self.ends.push(self.all.len());
    }

    /// How many blocks there are.
    pub(super) fn len(&self) -> usize {
        self.ends.len()
    }

    pub(super) fn all(&self) -> &[T] {
        &self.all
    }

    pub(super) fn of(&self, block: usize) -> &[T] {
        &self.all[self.begin(block)..self.ends[block]]
    }

    pub(super) fn of_mut(&mut self, block: usize) -> &mut [T] {
        let begin = self.begin(block);
        &mut self.all[begin..self.ends[block]]
    }

    fn begin(&self, block: usize) -> usize {
        block.checked_sub(1).map_or(0, |before| self.ends[before])
    }
}

impl<T, R: IntoIterator<Item = T>> FromIterator<R> for Runs<T> {
    fn from_iter<I: IntoIterator<Item = R>>(blocks: I) -> Self {
        let mut runs = Self::with_capacity(0, 0);
        blocks.into_iter().for_each(|block| runs.push(block));
        runs
    }
}
