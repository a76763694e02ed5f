//! Places in a BPF array: handed out, taken back, claimed.

/// Which places are taken, one bit each.
pub(super) struct IndexPool {
    taken: Vec<u64>,
    size: u32,
    /// No place below it is free.
    lowest: u32,
}

impl IndexPool {
    /// All places below `size`, free.
    pub(super) fn new(size: u32) -> Self {
        Self { taken: Vec::new(), size, lowest: 0 }
    }

    /// The lowest free place; `None` if there is none.
    pub(super) fn take(&mut self) -> Option<u32> {
        let index = (self.lowest..self.size).find(|index| !self.is_taken(*index))?;
        self.lowest = index + 1;
        self.claim(index).then_some(index)
    }

    /// Takes this place; false if it is taken already or does not exist.
    pub(super) fn claim(&mut self, index: u32) -> bool {
        if index >= self.size || self.is_taken(index) {
            return false;
        }
        let (word, bit) = place(index);
        if word >= self.taken.len() {
            self.taken.resize(word + 1, 0);
        }
        self.taken[word] |= bit;
        true
    }

    /// Frees a place.
    pub(super) fn give_back(&mut self, index: u32) {
        let (word, bit) = place(index);
        if let Some(word) = self.taken.get_mut(word) {
            *word &= !bit;
            self.lowest = self.lowest.min(index);
        }
    }

    fn is_taken(&self, index: u32) -> bool {
        let (word, bit) = place(index);
        self.taken.get(word).is_some_and(|word| word & bit != 0)
    }
}

fn place(index: u32) -> (usize, u64) {
    (index as usize / 64, 1 << (index % 64))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn it_behaves_like_a_set(steps: Vec<(u8, u8)>) {
            const SIZE: u32 = 150;
            let mut pool = IndexPool::new(SIZE);
            let mut model = BTreeSet::new();
            for (step, index) in steps {
                let index = u32::from(index);
                match step % 4 {
                    0 => {
                        let fits = index < SIZE && model.insert(index);
                        prop_assert_eq!(pool.claim(index), fits);
                    }
                    1 => {
                        pool.give_back(index);
                        model.remove(&index);
                    }
                    _ => {
                        let lowest = (0..SIZE).find(|index| !model.contains(index));
                        prop_assert_eq!(pool.take(), lowest);
                        model.extend(lowest);
                    }
                }
            }
        }
    }

    #[test]
    fn a_full_pool_gives_nothing() {
        let mut pool = IndexPool::new(70);
        for index in 0..70 {
            assert_eq!(pool.take(), Some(index));
        }
        assert_eq!(pool.take(), None);
        pool.give_back(3);
        assert_eq!(pool.take(), Some(3));
    }
}
