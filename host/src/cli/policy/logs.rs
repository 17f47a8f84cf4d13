//! `kvasir policy logs`.

use super::{Target, moment, slot};
use clap::{Args, ValueEnum};
use kvasir_client::control::{Control, ControlError};
use kvasir_proto as proto;
use std::process::ExitCode;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// How often a host is asked for new lines.
const FOLLOW: Duration = Duration::from_millis(250);

/// Show what the policies of a slot logged, and what the host says of them.
#[derive(Args, Debug)]
pub(super) struct LogsArgs {
    #[arg(value_parser = slot)]
    slot: String,
    /// Go on with new lines as they come; ^C ends it.
    #[arg(short, long)]
    follow: bool,
    /// Only lines since then: a span such as `10m`, or a time such as `2026-01-31T12:00:00Z`.
    #[arg(long, value_name = "SPAN|TIME", value_parser = since)]
    since: Option<SystemTime>,
    /// Only lines at least as grave.
    #[arg(long, value_enum, default_value = "debug")]
    level: Level,
    #[command(flatten)]
    to: Target,
}

/// From grave to chatty; the numbers are the contract's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
enum Level {
    Error = 1,
    Warn,
    Info,
    Debug,
}

impl LogsArgs {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        if !self.follow {
            let page = self.to.host.control(async |mut control| self.page(&mut control, 0).await)?;
            self.print_page(&page);
            return Ok(ExitCode::SUCCESS);
        }
        let followed = self.to.host.control(async |control| {
            tokio::select! {
                ended = self.follow(control) => ended.map(Some),
                _ = tokio::signal::ctrl_c() => Ok(None),
            }
        });
        match followed? {
            None => Ok(ExitCode::SUCCESS),
            Some(end) => {
                eprintln!("kvasir: {end}");
                Ok(ExitCode::from(1))
            }
        }
    }

    async fn page(&self, control: &mut Control, after: u64) -> Result<proto::LogsResponse, ControlError> {
        let request = proto::LogsRequest { slot: self.slot.clone(), after };
        Ok(control.policy.logs(request).await?.into_inner())
    }

    /// Prints lines until the host goes, and says how it went.
    async fn follow(&self, mut control: Control) -> Result<&'static str, ControlError> {
        let first = self.page(&mut control, 0).await?;
        let (began, mut dropped) = (first.began_ms, first.dropped);
        let mut last = first.lines.last().map_or(0, |line| line.number);
        self.print_lines(&first.lines);
        loop {
            tokio::time::sleep(FOLLOW).await;
            let page = match self.page(&mut control, last).await {
                Ok(page) => page,
                Err(error) if error.retryable() => return Ok("the host is gone"),
                Err(error) => return Err(error),
            };
            if page.began_ms != began {
                return Ok("the host was started again; ask again for what is new");
            }
            if page.lost > 0 {
                eprintln!("kvasir: {} lines came faster than they were read, and are lost", page.lost);
            }
            if page.dropped > dropped {
                eprintln!("kvasir: {} lines over the rate limit were dropped", page.dropped - dropped);
            }
            self.print_lines(&page.lines);
            (last, dropped) = (page.lines.last().map_or(last, |line| line.number), page.dropped);
        }
    }

    fn wanted(&self, line: &proto::LogLine) -> bool {
        let since =
            self.since.map_or(0, |since| since.duration_since(UNIX_EPOCH).unwrap_or_default().as_millis());
        line.level <= self.level as u32 && u128::from(line.at_ms) >= since
    }

    /// Writes each line at once and whole, since somebody may read them through a pipe.
    fn print_lines(&self, lines: &[proto::LogLine]) {
        for line in lines.iter().filter(|line| self.wanted(line)) {
            if self.to.json {
                println!("{}", object(line));
            } else {
                println!("{} {:5} {}", moment(line.at_ms), level(line.level), line.text);
            }
        }
    }

    fn print_page(&self, page: &proto::LogsResponse) {
        if self.to.json {
            let lines: Vec<_> = page.lines.iter().filter(|line| self.wanted(line)).map(object).collect();
            println!("{}", serde_json::json!({ "lines": lines, "dropped": page.dropped }));
            return;
        }
        self.print_lines(&page.lines);
        if page.dropped > 0 {
            println!("{} lines over the rate limit were dropped", page.dropped);
        }
    }
}

fn object(line: &proto::LogLine) -> serde_json::Value {
    let proto::LogLine { number, at_ms, text, .. } = line;
    serde_json::json!({ "number": number, "at_ms": at_ms, "level": level(line.level), "text": text })
}

fn level(level: u32) -> &'static str {
    ["error", "warn", "info", "debug"].get(level.wrapping_sub(1) as usize).copied().unwrap_or("debug")
}

fn since(text: &str) -> Result<SystemTime, String> {
    let before = |span| SystemTime::now().checked_sub(span);
    let time = humantime::parse_duration(text).ok().and_then(before);
    time.or_else(|| humantime::parse_rfc3339_weak(text).ok()).ok_or_else(|| {
        "write a span such as `10m` or `2h 30m`, or a time in UTC such as `2026-01-31T12:00:00Z`".to_owned()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn since_takes_spans_and_times() {
        assert!(since("10m").unwrap() < SystemTime::now());
        assert_eq!(since("1970-01-02 00:00:00").unwrap(), UNIX_EPOCH + Duration::from_secs(86_400));
        for bad in ["", "soon", "-3", "10 apples"] {
            assert!(since(bad).unwrap_err().contains("10m"), "{bad}");
        }
    }
}
