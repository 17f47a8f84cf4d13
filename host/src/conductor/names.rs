//! Dense numbers for names.

use std::collections::HashMap;

/// Numbers from 1 in the order in which the names came; a name keeps its number.
#[derive(Debug)]
pub(super) struct Names {
    numbers: HashMap<String, u32>,
    limit: usize,
    refused: u64,
}

impl Names {
    pub(super) fn new(limit: usize) -> Self {
        Self { numbers: HashMap::new(), limit, refused: 0 }
    }

    /// The number of a name, a new one if it is new. Returns `None` if there is no room for it.
    pub(super) fn number(&mut self, name: &str) -> Option<u32> {
        if let Some(&number) = self.numbers.get(name) {
            return Some(number);
        }
        if self.numbers.len() >= self.limit {
            self.refused += 1;
            return None;
        }
        let number = self.numbers.len() as u32 + 1;
        self.numbers.insert(name.to_owned(), number);
        Some(number)
    }

    /// How often there was no room for a name.
    pub(super) fn refused(&self) -> u64 {
        self.refused
    }

    /// The same for callers that must not take the last numbers from others.
    pub(super) fn number_if_half_empty(&mut self, name: &str) -> Option<u32> {
        match self.numbers.get(name) {
            Some(&number) => Some(number),
            None if self.numbers.len() < self.limit / 2 => self.number(name),
            None => {
                self.refused += 1;
                None
            }
        }
    }

    /// How many names there are: the largest number.
    pub(super) fn len(&self) -> usize {
        self.numbers.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_keeps_its_number_and_there_are_no_more_than_allowed() {
        let mut names = Names::new(2);
        assert_eq!(
            ["a", "b", "a", "c", "b"].map(|name| names.number(name)),
            [Some(1), Some(2), Some(1), None, Some(2)]
        );
        assert_eq!((names.len(), names.refused()), (2, 1));
    }
}
