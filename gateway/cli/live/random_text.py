"""Prompts that no cache holds: random words, each of which is one token in the usual vocabularies."""

from __future__ import annotations

from random import Random, SystemRandom

# Frequent words of English: a token each, with the space before, in the encodings of OpenAI.
WORDS = """
able about above across act add after again age ago air all also always animal answer any area arm around art ask away
baby back bad ball bank base bear beat bed before begin behind best better big bird black blue board boat body book
born both box boy bring brother brown build business buy call car care carry case cat center change check child city
class clean clear close cloud cold color common cook cool copy corner cost count country course cover cross cut dark
data daughter day deal deep door double down draw dream dress drink drive drop dry during each early earth east eat
edge egg end energy enough even evening event ever every eye face fact fall family far farm fast father feel field
fill final find fine fire first fish five floor flow flower fly follow food foot force forest form forward four free
fresh friend front fruit full game garden gas glass gold good grass gray great green ground group grow guess hair half
hand happy hard hat head hear heart heat heavy help high hill history hold hole home hope horse hotel hour house ice
idea inch iron island job join joy jump keep key kind king kitchen lake land large last late laugh law lead learn left
leg letter level lie life light like line list little live local long look loud love low luck lunch machine main map
mark market matter meal mean meet metal middle milk mind minute money month moon more morning mother mountain mouth
move music name near neck need never new next night noise north nose note number ocean office oil old once open orange
order other own page paint pair paper park part party pass past path pay peace people person picture piece place plan
plant play point poor post power press price problem pull push quick quiet race radio rain reach read ready reason red
rest rice rich ride ring rise river road rock roof room root round rule run safe salt same sand save school science
sea season seat second seed sell send sense serve set seven shape share sharp ship shoe shop short show side sign
silver simple sing sister six size skin sky sleep slow small smell smile snow soft soil song soon sound south space
speak speed spring square stand star start state station stay step stone stop store storm story street strong student
study sugar summer sun sure sweet swim table tail take talk tall taste teach team tell ten test thing think third
three tie time tiny today together tone tooth top total touch town trade train travel tree trip true turn twelve uncle
under unit until use valley value very view village visit voice walk wall warm wash watch water wave way weather week
weight west wheel white whole wide wild wind window winter wish wonder wood word work world year yellow young zero
""".split()


def random_text(words: int, random: Random | None = None) -> str:
    """As many words. Without `random` nobody has seen the text before."""
    return " ".join((random or SystemRandom()).choices(WORDS, k=words))
