//! The name by which two engines know one prompt that goes from one to the other.

use kvasir_protocol::block::BlockKey;
use sha2::{Digest, Sha256};

use super::{JobError, Namespace};

/// The longest name.
const NAME_MAX: usize = 256;

/// A prompt on its way from one engine to another: the name of their request, and the namespace of both.
///
/// Hosts know a hand-over by a number, and blocks by their keys. Both are made of this, so engines that differ in anything that a
/// namespace says never meet, and blocks of two transfers never do: the same prompt may go twice at once, and a block that is
/// stored has another key than one that is handed over.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Transfer {
    name: Vec<u8>,
    namespace: [u8; 32],
    keys: Namespace,
}

impl Transfer {
    /// # Errors
    /// [`JobError::Transfer`]: the name is empty or longer than 256 bytes.
    pub fn new(name: &[u8], namespace: &Namespace) -> Result<Self, JobError> {
        if !(1..=NAME_MAX).contains(&name.len()) {
            return Err(JobError::Transfer { len: name.len() });
        }
        let (name, namespace) = (name.to_vec(), *namespace.digest());
        let keys = Namespace::new(digest(b"kvasir hand-over keys", &name, &namespace, &[]));
        Ok(Self { name, namespace, keys })
    }

    /// The key under which the block with this engine hash is handed over.
    pub fn key(&self, engine_hash: &[u8]) -> BlockKey {
        self.keys.key(engine_hash)
    }

    /// The number of the hand-over that begins with the prompt's block `from`, counted from 0.
    ///
    /// The number tells where the part begins, and not which part it is, so a receiver that has the blocks before it can ask
    /// for it, wherever they came from.
    pub fn request(&self, from: u32) -> u64 {
        let digest = digest(b"kvasir hand-over", &self.name, &self.namespace, &from.to_le_bytes());
        u64::from_le_bytes(std::array::from_fn(|at| digest[at]))
    }
}

/// All but the name have fixed lengths, so no two lists give the same bytes.
fn digest(what: &[u8], name: &[u8], namespace: &[u8; 32], rest: &[u8]) -> [u8; 32] {
    let parts = [what, name, namespace.as_slice(), rest];
    parts.iter().fold(Sha256::new(), |sum, part| sum.chain_update(part)).finalize().into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_differs_in_anything_has_other_numbers_and_keys() {
        let (ours, theirs) = (Namespace::new([1; 32]), Namespace::new([2; 32]));
        let all = [
            Transfer::new(b"a", &ours).unwrap(),
            Transfer::new(b"b", &ours).unwrap(),
            Transfer::new(b"a", &theirs).unwrap(),
        ];
        assert_eq!(all[0], Transfer::new(b"a", &ours).unwrap());
        let mut numbers: Vec<u64> =
            all.iter().flat_map(|transfer| [0, 1, 512].map(|from| transfer.request(from))).collect();
        let mut keys: Vec<String> =
            all.iter().flat_map(|transfer| [b"x", b"y"].map(|hash| transfer.key(hash).to_string())).collect();
        keys.extend([ours.key(b"x").to_string(), theirs.key(b"x").to_string()]);
        let (count, of) = ((numbers.len(), keys.len()), "all of them differ");
        numbers.sort_unstable();
        numbers.dedup();
        keys.sort_unstable();
        keys.dedup();
        assert_eq!((numbers.len(), keys.len()), count, "{of}");
        // Both sides of a transfer may have different versions of this.
        assert_eq!((all[0].request(0), all[0].request(512)), NUMBERS);
    }

    /// Computed with Python's hashlib.
    const NUMBERS: (u64, u64) = (0xce1009808f1c52ce, 0xf89094f70703b2f5);

    #[test]
    fn a_name_has_a_length() {
        let space = Namespace::new([0; 32]);
        assert!(Transfer::new(&[7; 256], &space).is_ok());
        for len in [0, 257] {
            assert_eq!(Transfer::new(&vec![7; len], &space), Err(JobError::Transfer { len }));
        }
    }
}
