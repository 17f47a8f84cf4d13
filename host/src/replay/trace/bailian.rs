//! Lines of the Qwen-Bailian release, and the class, turn and conversation they name.
//!
//! Beside what the Mooncake format has: `chat_id`, `parent_chat_id` (-1: a first turn), `type` and `turn`; `timestamp` in
//! seconds; blocks of 16 tokens. Origin: alibaba-edu/qwen-bailian-usagetraces-anon, the traces of "KVCache Cache in the Wild"
//! (USENIX ATC 2025).

use super::{MAX_TIME_MS, Request};
use hashbrown::HashMap;
use serde::Deserialize;

/// Tokens per block in the traces of that release.
pub(super) const BLOCK_SIZE_TOKENS: u32 = 16;
/// Types the release names; any other, and none, counts as one more.
const TYPES: [&str; 4] = ["text", "search", "image", "file"];
/// Turns that have a class of their own; later ones are with the last.
const TURNS: u16 = 4;

#[derive(Deserialize)]
struct Line {
    timestamp: f64,
    input_length: u32,
    output_length: u32,
    hash_ids: Vec<u64>,
    #[serde(default)]
    r#type: Option<String>,
    turn: u16,
    chat_id: i64,
    parent_chat_id: i64,
}

/// Finds the conversation that a request goes on with: 16 bytes a request.
#[derive(Default)]
pub(super) struct Chats {
    /// By request, the first of its conversation.
    first: HashMap<i64, i64>,
}

impl Chats {
    /// # Errors
    /// Text for a person: not such a line.
    pub(super) fn parse(&mut self, line: &[u8]) -> Result<Request, String> {
        let line: Line = serde_json::from_slice(line).map_err(|error| {
            format!(
                "{}; expected an object with timestamp (s), input_length, output_length, hash_ids, chat_id, parent_chat_id and \
                 turn",
                super::without_line(&error)
            )
        })?;
        let latest_s = MAX_TIME_MS as f64 / 1e3;
        if !(0.0..=latest_s).contains(&line.timestamp) {
            return Err(format!("timestamp {} is outside 0 to {latest_s} seconds", line.timestamp));
        }
        // A parent from before the trace began is known by its number alone.
        let parent = Some(line.parent_chat_id).filter(|&parent| parent >= 0);
        let first = parent.map_or(line.chat_id, |id| self.first.get(&id).copied().unwrap_or(id));
        self.first.insert(line.chat_id, first);
        Ok(Request {
            time_us: (line.timestamp * 1e6).round() as u64,
            input_tokens: line.input_length,
            output_tokens: line.output_length,
            blocks: line.hash_ids,
            class: Some(class(line.r#type.as_deref(), line.turn)),
            turn: Some(line.turn.max(1)),
            session: Some(first.cast_unsigned()),
            ..Request::default()
        })
    }
}

/// 4 × type + turn, so 1 to 20: the paper's classes are pairs of both (its figure 15).
fn class(name: Option<&str>, turn: u16) -> u16 {
    let number = TYPES.iter().position(|&known| Some(known) == name).unwrap_or(TYPES.len());
    number as u16 * TURNS + turn.clamp(1, TURNS)
}

#[cfg(test)]
mod tests {
    use super::super::{Format, Reader};
    use super::*;
    use std::path::Path;

    fn line(chat: i64, parent: i64, time: &str, more: &str) -> String {
        format!(
            "{{\"chat_id\":{chat},\"parent_chat_id\":{parent},\"timestamp\":{time},\"input_length\":33,\"output_length\":5,\
             \"hash_ids\":[7,8,9]{more}}}\n"
        )
    }

    fn read(text: String) -> Result<Vec<Request>, super::super::Error> {
        let input = std::io::Cursor::new(text.into_bytes());
        Reader::new(Path::new("t"), input).unwrap().of_format(Format::Bailian).collect()
    }

    #[test]
    fn lines_of_the_release_are_read() {
        let text = [
            line(159, 55, "0.0", ",\"type\":\"text\",\"turn\":2"),
            line(3, -1, "61.114", ",\"type\":\"file\",\"turn\":1"),
            line(160, 159, "61.114", ",\"type\":\"text\",\"turn\":9"),
            line(4, 3, "70", ",\"type\":\"audio\",\"turn\":2"),
            line(5, -1, "70", ",\"turn\":1"),
        ];
        let requests = read(text.concat()).unwrap();
        let told: Vec<_> =
            requests.iter().map(|r| (r.time_us, r.class, r.turn, r.session.unwrap())).collect();
        let expected = [
            (0, Some(2), Some(2), 55),
            (61_114_000, Some(13), Some(1), 3),
            (61_114_000, Some(4), Some(9), 55),
            (70_000_000, Some(18), Some(2), 3),
            (70_000_000, Some(17), Some(1), 5),
        ];
        assert_eq!(told, expected);
        assert_eq!((requests[0].input_tokens, requests[0].blocks.len()), (33, 3));
    }

    #[test]
    fn bad_lines_say_what_was_expected() {
        let good = ",\"turn\":1";
        let rows = [
            (line(1, -1, "-1", good), "timestamp -1 is outside 0 to 4503599627.37 seconds"),
            (line(1, -1, "1e300", good), "is outside 0 to"),
            (line(1, -1, "1", ""), "missing field `turn`"),
            (line(1, -1, "\"1\"", good), "expected an object with timestamp (s)"),
            (line(1, -1, "1", good).replace("33", "330"), "expected 21 blocks of 16 tokens"),
            (line(1, -1, "2", good) + &line(1, -1, "1", good), "t:2: timestamp 1000 follows 2000"),
        ];
        for (text, expected) in rows {
            let error = read(text).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }
}
