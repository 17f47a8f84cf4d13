//! Inputs for property tests of policies.
//!
//! Of an evictor: compare it with a model over [`steps`] by means of [`kvasir_policy::testing::run`], see that it survives
//! [`words`] by means of [`feed`], and that [`keeps_books`] over whatever was [`said`]. Of a scheduler: see that it
//! [`chooses_what_is_there`] whatever was [`asked`].
//!
//! It is a crate of its own, so that the SDK does not bring a test framework to authors of policies.

use kvasir_policy::evictor::{Event, EventKind, Events, Kept, NO_SLOT, Victim};
use kvasir_policy::scheduler::{self, Decision, Layout, Placement};
use kvasir_policy::testing::Step;
use kvasir_policy::{Evictor, Scheduler};
use proptest::prelude::*;
use std::ops::Range;

/// What happens to a small pool: prompts of up to 5 blocks that share heads, and an occasional removal.
///
/// `wait_ms` lies between steps; it starts at 1 if the policy's model orders blocks by time, so that each step has its
/// own time. Classes are below `classes`.
pub fn steps(wait_ms: Range<u64>, classes: u16) -> impl Strategy<Value = Vec<Step>> {
    let blocks = prop::collection::vec(0..3_u64, 1..6);
    let step = (wait_ms, 0..classes, blocks, prop::bool::weighted(0.1));
    let step = step.prop_map(|(wait_ms, class, blocks, remove)| Step { wait_ms, class, blocks, remove });
    prop::collection::vec(step, 1..80)
}

/// Words that are events, nearly events, or noise. The first two also say how long records are.
pub fn words() -> impl Strategy<Value = Vec<u32>> {
    prop::collection::vec(prop_oneof![0..20_u32, any::<u32>()], 0..400)
}

/// Gives a policy of 8 slots batches of arbitrary words, some of them as tiers, and asks for victims in between, even at
/// times that went back.
///
/// # Panics
/// The policy panics, or gives more victims than were wanted.
pub fn feed(policy: impl Evictor, words: &[u32]) {
    const WANT: u32 = 3;
    let mut policy = Kept::new(Box::new(policy));
    let sizes = words.iter().take(2).map(|size| size % 16);
    policy.open(&[8].into_iter().chain(sizes).collect::<Vec<u32>>());
    for (batch, words) in (0..).zip(words.chunks(40)) {
        policy.update_tiers(&words.iter().map(|&bits| f32::from_bits(bits)).collect::<Vec<_>>());
        policy.on_events(batch * 1_000, words);
        let victims = policy.select_victims(batch * 900, WANT).count();
        assert!(victims <= WANT as usize, "{victims} victims where {WANT} were wanted");
    }
}

/// Accesses to single blocks, of which none is in a chain: what algorithms are defined over that know no chains. A few
/// blocks are used often, the others seldom.
pub fn accesses() -> impl Strategy<Value = Vec<Step>> {
    let block = prop_oneof![0..6_u64, 0..40_u64];
    let step = (block, prop::bool::weighted(0.05));
    let step = step.prop_map(|(block, remove)| Step { wait_ms: 1, class: 0, blocks: vec![block], remove });
    prop::collection::vec(step, 1..200)
}

/// Something that a host may say of a block, or a question for victims.
#[derive(Clone, Copy, Debug)]
pub struct Said {
    /// `None` asks for victims, as many as `slot` says.
    kind: Option<EventKind>,
    slot: u32,
    /// The block before it in its chain, if that is resident.
    parent: u32,
}

/// Hosts that say anything in any order, for [`keeps_books`].
pub fn said() -> impl Strategy<Value = Vec<Said>> {
    use EventKind::{Hit, Insert, Keep, Pin, Remove, Unpin};
    let kind = prop::sample::select(vec![Insert, Insert, Insert, Hit, Hit, Keep, Remove, Pin, Unpin]);
    let said = (prop::option::weighted(0.8, kind), 0..SLOTS, 0..SLOTS);
    prop::collection::vec(said.prop_map(|(kind, slot, parent)| Said { kind, slot, parent }), 1..120)
}

/// Slots of the pool of [`keeps_books`].
const SLOTS: u32 = 8;

/// What became of a block, as a host knows it.
#[derive(Clone, Copy, PartialEq)]
enum Fate {
    Free,
    OnBooks,
    /// In the pool still, or evicted.
    Chosen,
    Pinned,
}

/// Checks the contract's books: only blocks on them are chosen, each once, and as many as are wanted and there. What a host
/// would not say is left out.
///
/// # Panics
/// The policy breaks the contract.
pub fn keeps_books(policy: impl Evictor, said: &[Said]) {
    let mut policy = Kept::new(Box::new(policy));
    policy.open(&kvasir_policy::evictor::Layout::of(SLOTS).encode());
    let mut fates = [Fate::Free; SLOTS as usize];
    for (now, &Said { kind, slot, parent }) in (0..).zip(said) {
        let Some(kind) = kind else {
            choose(&mut policy, now, slot, &mut fates);
            continue;
        };
        let at = slot as usize;
        fates[at] = match (kind, fates[at]) {
            // One that was used after it was chosen may have been evicted all the same.
            (EventKind::Insert, Fate::Free | Fate::Chosen | Fate::OnBooks) => Fate::OnBooks,
            (EventKind::Insert, _) | (_, Fate::Free) => continue,
            (EventKind::Keep, Fate::OnBooks | Fate::Pinned) => continue,
            (EventKind::Hit, Fate::Pinned) | (EventKind::Pin, _) => Fate::Pinned,
            (EventKind::Hit | EventKind::Keep, _) | (EventKind::Unpin, Fate::Pinned) => Fate::OnBooks,
            (EventKind::Unpin, _) => continue,
            (EventKind::Remove, _) => Fate::Free,
        };
        let resident = parent != slot && fates[parent as usize] != Fate::Free;
        let parent_or_uses = match kind {
            EventKind::Insert if resident => parent,
            EventKind::Insert => NO_SLOT,
            _ => 1,
        };
        let mut words = Vec::new();
        event(kind, slot, parent_or_uses).encode(0, &mut words);
        policy.on_events(0, &words);
    }
    choose(&mut policy, said.len() as u64, SLOTS, &mut fates);
}

fn choose(policy: &mut Kept<impl Evictor>, now: u64, want: u32, fates: &mut [Fate]) {
    let on_books = fates.iter().filter(|&&fate| fate == Fate::OnBooks).count();
    let mut chosen = 0;
    for word in policy.select_victims(now, want) {
        let Victim { slot, .. } = Victim::unpack(word);
        assert!(fates[slot as usize] == Fate::OnBooks, "slot {slot} is not on the books");
        fates[slot as usize] = Fate::Chosen;
        chosen += 1;
    }
    assert_eq!(chosen, on_books.min(want as usize), "{on_books} on the books, {want} wanted");
}

/// An evictor whose pool has many more slots than blocks, as that of a host has: it must choose as without them.
pub struct Roomy<E>(pub E);

impl<E: Evictor> Evictor for Roomy<E> {
    fn describe(&self) -> kvasir_policy::Description {
        self.0.describe()
    }

    fn open(&mut self, slots: u32) {
        self.0.open(slots * 16);
    }

    fn on_events(&mut self, events: Events<'_>) {
        self.0.on_events(events);
    }

    fn select_victims(&mut self, now_ms: u64, want: u32, victims: &mut Vec<Victim>) {
        self.0.select_victims(now_ms, want, victims);
    }
}

fn event(kind: EventKind, slot: u32, parent_or_uses: u32) -> Event {
    let identity = u64::from(slot) << 7 | 1;
    let (size_bytes, time_ms) = (1 << 20, u64::from(slot));
    Event {
        kind,
        replayed: false,
        class: 0,
        slot,
        parent_or_uses,
        depth: 0,
        size_bytes,
        time_ms,
        identity,
        tenant: 0,
    }
}

/// Tables and a question of noise.
#[derive(Clone, Debug)]
pub struct Asked {
    layout: Layout,
    rows: Vec<f32>,
    now: f32,
    question: Vec<u32>,
}

/// Hosts that say anything, for [`chooses_what_is_there`].
pub fn asked() -> impl Strategy<Value = Asked> {
    let rows = prop::collection::vec(any::<f32>(), 0..120);
    let question = prop::collection::vec(any::<u32>(), 0..60);
    (0..6_u32, prop_oneof![Just(16), any::<u32>()], rows, any::<f32>(), question).prop_map(
        |(slots, block_size_tokens, rows, now, question)| {
            let layout = Layout { domains: 3, ..Layout::of(slots, slots, block_size_tokens) };
            Asked { layout, rows, now, question }
        },
    )
}

/// Gives a scheduler the tables, and asks it for scores and a decision.
///
/// # Panics
/// The policy panics, or takes a slot that is not there.
pub fn chooses_what_is_there(policy: impl Scheduler + 'static, asked: &Asked) {
    let Asked { layout, rows, now, question } = asked;
    let mut kept = scheduler::Kept::new(Box::new(policy));
    kept.open(&layout.encode());
    kept.update_prefill(rows);
    kept.update_decode(rows);
    kept.update_links(rows);
    kept.explain(*now, question);
    if let Decision::Run(Placement { prefill, decode, .. }) = kept.schedule(*now, question) {
        let there = prefill < layout.prefill_slots && decode < layout.decode_slots;
        assert!(there, "{prefill} of {}, {decode} of {}", layout.prefill_slots, layout.decode_slots);
    }
}
