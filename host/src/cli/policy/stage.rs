//! What a policy is loaded for, as flags say it and as tables show it.

use clap::Args;
use kvasir_client::control::PolicyStage;
use kvasir_proto::{self as proto, stage::Kind, stage::Share};

#[derive(Args, Debug)]
#[group(multiple = false)]
pub(super) struct StageFlags {
    /// On trial: it is asked beside the active policy, and decides nothing.
    #[arg(long)]
    shadow: bool,
    /// On trial: it decides for this share of the sessions (`5%`), or for one tenant (`tenant=7`).
    #[arg(long, value_name = "SHARE", value_parser = canary)]
    canary: Option<PolicyStage>,
    /// Into service at once, which ends a trial; so it is without a flag.
    #[arg(long)]
    active: bool,
}

impl StageFlags {
    pub(super) fn stage(&self) -> PolicyStage {
        match self.canary {
            Some(canary) => canary,
            None if self.shadow => PolicyStage::Shadow,
            None => PolicyStage::Active,
        }
    }
}

/// A share of the sessions in tenths of a percent, or a tenant.
fn canary(text: &str) -> Result<PolicyStage, String> {
    if let Some(tenant) = text.strip_prefix("tenant=") {
        let number = tenant.parse().map_err(|_| format!("`{tenant}` is not the number of a tenant"))?;
        return Ok(PolicyStage::CanaryTenant(number));
    }
    let percent = text.strip_suffix('%').ok_or("write a share such as `5%`, or `tenant=NUMBER`")?;
    let (whole, tenths) = percent.split_once('.').unwrap_or((percent, "0"));
    let digit = |text: &str, most| text.len() <= most && text.bytes().all(|b| b.is_ascii_digit());
    let share = match (digit(whole, 3), digit(tenths, 1), whole.parse::<u32>(), tenths.parse::<u32>()) {
        (true, true, Ok(whole), Ok(tenths)) => 10 * whole + tenths,
        _ => return Err("a share is a number of percent with at most one digit behind the point".into()),
    };
    if (1..=1_000).contains(&share) {
        return Ok(PolicyStage::CanaryPerMille(share));
    }
    Err("a canary takes 0.1% to 100% of the sessions".into())
}

/// As people say it: `active`, `shadow`, `canary 5%`, `canary tenant 7`.
pub(super) fn words(stage: &proto::Stage) -> String {
    match (stage.kind(), stage.share) {
        (Kind::Active, _) => "active".into(),
        (Kind::Shadow, _) => "shadow".into(),
        (Kind::Canary, Some(Share::PerMille(share))) => format!("canary {}%", f64::from(share) / 10.0),
        (Kind::Canary, Some(Share::Tenant(tenant))) => format!("canary tenant {tenant}"),
        (Kind::Canary, None) => "canary".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_and_tenants_are_read() {
        for (text, stage, shown) in [
            ("5%", PolicyStage::CanaryPerMille(50), "canary 5%"),
            ("0.1%", PolicyStage::CanaryPerMille(1), "canary 0.1%"),
            ("12.5%", PolicyStage::CanaryPerMille(125), "canary 12.5%"),
            ("100%", PolicyStage::CanaryPerMille(1_000), "canary 100%"),
            ("tenant=7", PolicyStage::CanaryTenant(7), "canary tenant 7"),
        ] {
            assert_eq!(canary(text), Ok(stage), "{text}");
            assert_eq!(words(&stage.into()), shown);
        }
        for bad in [
            "", "5", "%", ".%", "0%", "0.0%", "0.05%", "100.1%", "-5%", "+5%", "5 %", "1e1%", "tenant=",
            "tenant=x",
        ] {
            assert!(canary(bad).is_err(), "{bad}");
        }
    }
}
